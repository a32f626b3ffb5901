"""Makes the parts of the embedded pair: the tokenizer, rows of tokens to train on, and trained OPT models."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

__all__ = ["Shape", "build_model", "fit", "token_rows", "train_tokenizer"]

MAX_POSITIONS = 512
_PAD, _BOS, _EOS = "<pad>", "<s>", "</s>"
_REPORT_EVERY = 50  # steps
_WARMUP = 20  # steps
_MUON_RATE, _ADAMW_RATE = 0.025, 5e-3

# Jordan's quintic: five iterations bring every singular value to about one.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.01  # of Muon


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one OPT model."""

    hidden_size: int
    num_layers: int
    num_heads: int


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` tokens that puts ``<s>`` in front of what it encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A $B", special_tokens=[(_BOS, backend.token_to_id(_BOS))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
        tokenizer_object=backend,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def token_rows(texts: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Rows of `MAX_POSITIONS` token ids: texts between ``<s>`` and ``</s>``, the last one cut.

    Every row starts with a text, as a prompt does.
    """
    encode = tokenizer.backend_tokenizer.encode  # unlike `tokenizer` itself, does not warn of long texts
    eos_token_id = int(tokenizer.eos_token_id)
    row: list[int] = []
    for text in texts:
        row += [*encode(text).ids, eos_token_id]
        if len(row) >= MAX_POSITIONS:
            yield row[:MAX_POSITIONS]
            row = []


def build_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> OPTForCausalLM:
    """An OPT model with random weights and without dropout."""
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        word_embed_proj_dim=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        ffn_dim=4 * shape.hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        do_layer_norm_before=True,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return OPTForCausalLM(config)


def fit(
    model: OPTForCausalLM,
    rows: Iterator[list[int]],
    *,
    steps: int,
    rows_per_step: int,
    label: str,
) -> float:
    """Train `model` in place for `steps` steps and print the progress after `label`.

    Returns the loss in nats a token, a mean over the last steps.
    """
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, partial(_rate, steps=steps)) for one in optimizers]
    model.train()
    losses: list[float] = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        loss = _loss(model, torch.tensor(list(islice(rows, rows_per_step))))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses = [*losses, loss.item()][-_REPORT_EVERY:]
        if step % _REPORT_EVERY == 0 or step == steps:
            elapsed = time.perf_counter() - began
            left = elapsed / step * (steps - step)
            state = f"loss {sum(losses) / len(losses):.3f}, {elapsed:.0f} s, {left:.0f} s left"
            print(f"{label}: step {step}/{steps}, {state}", flush=True)
    return sum(losses) / len(losses)


def _optimizers(model: OPTForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and vectors."""
    params = dict(model.named_parameters())
    hidden = [name for name, param in params.items() if param.dim() == 2 and "embed" not in name]
    rest = [param for name, param in params.items() if name not in hidden]
    adamw = torch.optim.AdamW(rest, lr=_ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    return [_Muon([params[name] for name in hidden], lr=_MUON_RATE), adamw]


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / _WARMUP, (steps - step) / steps)


def _loss(model: OPTForCausalLM, input_ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token; `input_ids` is ``[rows, MAX_POSITIONS]``."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


class _Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is made orthogonal; it learnt faster than AdamW in short trials here.

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". PyTorch has one too, which computes
    in bfloat16; that is many times slower on processors without it.

    Args:
        params: weight matrices of hidden layers. Embeddings and vectors belong to another optimizer.
        lr: learning rate; the length of an update for a square matrix.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure is not supported
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for params in by_shape.values():  # one batched product for equal shapes
                updates = _orthogonalized(torch.stack([self._direction(param) for param in params]))
                rows, columns = params[0].shape
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * _WEIGHT_DECAY).sub_(update, alpha=scale)

    def _direction(self, param: torch.nn.Parameter) -> torch.Tensor:
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state["mean"] = torch.zeros_like(param)
        mean: torch.Tensor = state["mean"].lerp_(param.grad, 1 - _MOMENTUM)
        return param.grad.lerp(mean, _MOMENTUM)


def _orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices ``[count, rows, columns]`` with all singular values near one, by Newton-Schulz steps."""
    a, b, c = _COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    result: torch.Tensor = matrices.mT if tall else matrices  # the products are smallest this way round
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = result @ result.mT
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.mT if tall else result
