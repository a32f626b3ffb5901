"""The first layers of a target: what they compute is what a model of so many layers computes, and they leave no trace.

Oracle: Transformers' own model with fewer layers and the same weights, the whole sequence at once. float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from emssd_padded import PaddedConfig
from emssd_testing.models import ARCHITECTURES, tiny_model
from emssd_testing.oracle import DenseBackend, greedy_reference
from transformers import LlamaForCausalLM

from emssd.attention import AttentionBackend, Kept, KVCacheSpec
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.packing import pack, pack_nodes
from emssd.drafting import Draft, Drafter, Outcome
from emssd.errors import UnsupportedModelError
from emssd.hooks.registry import Registry
from emssd.model import BorrowedTarget, CausalLMRunner, ModelRunner, TargetModel
from emssd.sequences import Batch

NUM_LAYERS = 3
TEXTS = {"a": [3, 1, 4, 1, 5, 9, 2, 6, 5], "b": [7], "c": [8, 9, 7, 9, 3]}
TREE = [(11, -1), (12, -1), (13, 1), (14, 1), (15, 3)]  # its last node has a path that is no prefix
PATH = [1, 3, 4]


@cache
def target(architecture: str) -> TargetModel:
    layers = {"n_layer": NUM_LAYERS} if architecture == "gpt2" else {"num_hidden_layers": NUM_LAYERS}
    more = {"final_logit_softcapping": 3.0} if architecture == "gemma2" else {}
    return TargetModel(tiny_model(architecture, max_model_len=64, **layers, **more))


@cache
def shorter(architecture: str, num_layers: int) -> Any:
    """A model of its own, with copies of the weights."""
    whole = target(architecture).model
    values = whole.config.to_dict() | {"n_layer" if architecture == "gpt2" else "num_hidden_layers": num_layers}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:num_layers]
    model = type(whole)(type(whole.config)(**values)).double().eval()
    assert not model.load_state_dict(whole.state_dict(), strict=False).missing_keys
    model.set_attn_implementation("eager")
    return model


@dataclass
class Row:
    request_id: str
    tokens: Seq[int]
    num_cached: int = 0


def cache_of(whole: TargetModel, num_layers: int, backend: str = "ragged") -> AttentionBackend:
    spec: KVCacheSpec = whole.kv_cache_spec(4)
    spec = replace(spec, layers=spec.layers[:num_layers], trees=True, continuous=backend == "ragged")
    if backend != "dense":
        return make_backend(spec, backend, Registry())
    dense = DenseBackend()
    dense.allocate(spec)
    return dense


def logits_in_steps(runner: ModelRunner) -> dict[tuple[int, ...], torch.Tensor]:
    """Rows of logits by the tokens before them: texts in two pieces, a tree in two levels, and text after it."""
    names, result = list(TEXTS), dict[tuple[int, ...], torch.Tensor]()

    def step(starts: Seq[int], stops: Seq[int], texts: Seq[Seq[int]]) -> None:
        rows = [
            Row(name, text[:stop], start) for name, text, start, stop in zip(names, texts, starts, stops, strict=True)
        ]
        for row, logits in zip(rows, runner.run(pack(rows, Draft.empty(len(rows)))).logits, strict=True):
            result[tuple(row.tokens)] = logits

    texts = list(TEXTS.values())
    lengths = [len(text) for text in texts]
    firsts = [1 + length // 2 for length in lengths]
    step([0] * len(texts), firsts, texts)
    step([min(first, length - 1) for first, length in zip(firsts, lengths, strict=True)], lengths, texts)
    parents, paths = [parent for _, parent in TREE], list[list[int]]()
    for token, parent in TREE:
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    for start, stop in ((0, 2), (2, len(TREE))):
        new = torch.tensor([token for token, _ in TREE[start:stop]] * len(names))
        kv_lens, trees = [length + stop for length in lengths], [parents[:stop]] * len(names)
        packed = pack_nodes(names, new, [stop - start] * len(names), kv_lens, trees)
        nodes = [(*text, *path) for text in texts for path in paths[start:stop]]
        result |= dict(zip(nodes, runner.run(packed).logits, strict=True))
    kept = [length + len(PATH) for length in lengths]
    runner.commit(Kept(tuple(names), tuple(kept), tuple(tuple(length + node for node in PATH) for length in lengths)))
    longer = [[*text, *paths[-1], 5, 4] for text in texts]
    step(kept, [length + 2 for length in kept], longer)
    return result


def assert_close(got: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)  # eager attention takes its softmax in float32


@pytest.mark.parametrize("num_layers", range(1, NUM_LAYERS + 1))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_their_logits_are_those_of_a_model_with_fewer_layers(architecture: str, num_layers: int) -> None:
    whole, oracle = target(architecture), shorter(architecture, num_layers)
    before = whole.model(torch.tensor([TEXTS["a"]]), use_cache=False).logits
    runner = BorrowedTarget(whole).first_layers(num_layers, cache_of(whole, num_layers))
    result = logits_in_steps(runner)
    assert len(result) == 3 * (2 + len(TREE) + 1) - 1  # the text of one token has no second piece
    for tokens, logits in result.items():
        assert_close(logits, oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1])
    assert torch.equal(whole.model(torch.tensor([TEXTS["a"]]), use_cache=False).logits, before)
    assert not any("forward" in vars(module) for module in whole.model.modules())


@pytest.mark.parametrize("backend", ["padded", "dense"])
@torch.inference_mode()
def test_they_run_on_the_other_backends(backend: str) -> None:
    whole = target("mistral")
    on_ragged, on_other = (
        logits_in_steps(CausalLMRunner(whole, cache_of(whole, 2, name), 2)) for name in ("ragged", backend)
    )
    for tokens, logits in on_other.items():
        torch.testing.assert_close(logits, on_ragged[tokens])


@torch.inference_mode()
def test_their_hidden_states_are_those_of_the_target() -> None:
    whole = target("gemma2")
    runner = BorrowedTarget(whole).first_layers(2, cache_of(whole, 2))
    runner.take_hidden((2, 0, -1))
    packed = pack([Row("a", TEXTS["a"]), Row("b", TEXTS["b"])], Draft.empty(2))
    output = runner.run(packed._replace(logit_rows=packed.logit_rows[:0]))
    assert output.logits.shape == (0, whole.vocab_size)
    states = whole.model(torch.tensor([TEXTS["a"]]), use_cache=False, output_hidden_states=True).hidden_states
    for index in (0, 2):
        assert_close(output.hidden[index][:-1], states[index][0])
    fewer = shorter("gemma2", 2)(torch.tensor([TEXTS["a"]]), use_cache=False, output_hidden_states=True)
    assert_close(output.hidden[-1][:-1], fewer.hidden_states[-1][0])
    with pytest.raises(UnsupportedModelError, match="asks for hidden states 4, and Gemma2ForCausalLM has 3 layers"):
        runner.take_hidden((4,))


@torch.inference_mode()
def test_a_step_that_fails_leaves_the_target_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = target("llama")
    runner = CausalLMRunner(whole, cache_of(whole, 1), 1)
    packed = pack([Row("a", TEXTS["a"])], Draft.empty(1))
    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, "forward", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            runner.run(packed)
    right = shorter("llama", 1)(torch.tensor([TEXTS["a"]]), use_cache=False).logits[0, -1:]
    assert_close(runner.run(packed).logits, right)
    assert not any("forward" in vars(module) for module in whole.model.modules())


def test_a_forward_that_was_set_on_a_layer_is_there_afterwards() -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2)
    layer = model.model.layers[1]
    counted = layer.forward = Mock(wraps=layer.forward)
    whole = TargetModel(model)
    runner = CausalLMRunner(whole, cache_of(whole, 1), 1)
    counted.reset_mock()
    with torch.inference_mode():
        runner.run(pack([Row("a", TEXTS["a"])], Draft.empty(1)))
    counted.assert_not_called()
    assert layer.forward is counted


def test_layers_that_give_more_than_a_stream_are_refused() -> None:
    class Pairs(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[0].register_forward_hook(lambda module, args, out: (out,))
            self.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0][0], *args[1:]))

    whole = TargetModel(Pairs(tiny_model("llama").config).double().eval())
    with pytest.raises(UnsupportedModelError, match=r"^Pairs lends drafters no first layers: its layers give more"):
        CausalLMRunner(whole, cache_of(whole, 1), 1)


PROMPTS = [[1, 5, 6, 7, 5, 6, 7], [9], [3] * 12, [8, 2, 8, 4, 8]]


class Foresees(Drafter):
    """Drafts what the target itself says, and asks it in `observe` as well: by a call of its own, with a cache."""

    num_speculative_tokens = 3
    target: BorrowedTarget

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        chains = []
        for row, limit in zip(batch, budget, strict=True):
            text = list(row.tokens)
            for _ in range(limit):
                text.append(int(self.target.logits(torch.tensor(text))[-1].argmax()))
            chains.append(text[len(row.tokens) :])
        return Draft.from_chains(chains)

    def observe(self, outcome: Outcome) -> None:
        for row in outcome.batch:
            ids = torch.tensor(row.tokens)
            output: Any = self.target.model(ids.unsqueeze(0), use_cache=True)
            assert output.past_key_values.get_seq_length() == len(ids)
            torch.testing.assert_close(output.logits[0], self.target.logits(ids))


@pytest.mark.parametrize("backend", ["ragged", PaddedConfig()], ids=["ragged", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_by_a_drafter_that_is_then_always_right(kind: str, backend: Any) -> None:
    model, drafter = tiny_model(kind, max_model_len=64), Foresees()
    options = {"budget": "fixed", "on_drafter_error": "fail"}
    engine = Engine.from_model(model, drafter=drafter, backend=backend, batch_size=3, **options)
    drafter.target = BorrowedTarget(engine.target)
    before = model.config._attn_implementation
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, 12, ignore_eos=True), strict=True):
        assert list(done.token_ids) == greedy_reference(model, prompt, 12)
    assert engine.report.num_accepted == engine.report.num_drafted > 10
    assert model.config._attn_implementation == before
