"""The surroundings of a plugin in the suites: float64 targets, what each generates, and the context of a drafter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emssd.attention import AttentionBackend, KVCacheSpec
from emssd.drafting import Drafter, DrafterContext
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget, CausalLMRunner, ModelRunner, TargetModel, load_model
from emssd.plugins.registry import Registry
from emssd.testing.models import ARCHITECTURES, tiny_model
from emssd.testing.oracle import DenseBackend, References

__all__ = ["BATCH_SIZE", "MODEL_LEN", "NEW_TOKENS", "Setting", "drafters_of", "setting", "texts"]

BATCH_SIZE = 4
NEW_TOKENS = 16
MODEL_LEN = 64
_NOISE = 0.02  # of a draft model's weights: right most of the time, and not always
_STD = 0.12  # of a target's weights: its text repeats itself before long, so that retrieval has something to find


@dataclass(frozen=True, slots=True)
class Setting:
    """A target, what it generates, and what a drafter for it may borrow.

    Attributes:
        references: what the target generates alone, by prompt.
        context: for drafters; see `setting`.
    """

    name: str
    references: References
    context: DrafterContext

    @property
    def target(self) -> TargetModel:
        """The model."""
        return self.references.target

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return self.target.vocab_size


@cache
def setting(architecture: str, vocab_size: int) -> Setting:
    """A random target of a few tokens' vocabulary, in float64, made once; or one that is loaded.

    Args:
        architecture: a key of `ARCHITECTURES`, or the folder of a model, which is loaded in float64 on the CPU.
        vocab_size: of the random one.

    Its context gives drafters a tokenizer of one word per token. ``load_runner`` gives, whatever the path, a copy of
    the target with noise in its weights, on the dense reference: it is right often and not always. ``make_drafter``
    gives the installed drafters, ``target`` lends the target's embeddings and LM head, and ``make_cache``
    gives the dense reference.

    Raises:
        ConfigError: no such architecture.
    """
    name, tokenizer = f"a tiny model ({architecture}, {vocab_size} tokens)", _tokenizer(vocab_size)
    if architecture in ARCHITECTURES:
        target = TargetModel(tiny_model(architecture, vocab_size=vocab_size, max_model_len=MODEL_LEN, std=_STD))
    elif Path(architecture).is_dir():
        name, (target, tokenizer) = architecture, _loaded(architecture)
        vocab_size = target.vocab_size
    else:
        choices = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{architecture!r} is no folder of a model, nor a tiny model's architecture: {choices}")

    @cache
    def noisy() -> TargetModel:
        model = copy.deepcopy(target.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += _NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        return TargetModel(model)

    def load_runner(path: str, *, trees: bool = False) -> tuple[ModelRunner, Any]:
        model, cache = noisy(), DenseBackend()
        cache.allocate(model.kv_cache_spec(BATCH_SIZE))
        return CausalLMRunner(model, cache), tokenizer

    def make_cache(spec: KVCacheSpec) -> AttentionBackend:
        cache = DenseBackend()
        cache.allocate(spec)
        return cache

    def make_drafter(name: str, values: Mapping[str, Any]) -> Drafter:
        plugin = _registry().find("drafter", name)
        drafter: Drafter = plugin.build(plugin.config(**values), context)
        return drafter

    context = DrafterContext(
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        load_runner=load_runner,
        make_drafter=make_drafter,
        on_drafter_error="fail",
        target=BorrowedTarget(target),
        cache_spec=target.kv_cache_spec(BATCH_SIZE),
        make_cache=make_cache,
    )
    return Setting(name, References(target, NEW_TOKENS), context)


def texts(vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts, few enough for their references to be remembered: of one token and of many, repetitive and random."""
    generator = torch.Generator().manual_seed(0)
    found = list[tuple[int, ...]]()
    for length in (1, 2, 3, 7, 20, 31):
        random = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        pattern = torch.randint(0, vocab_size, (3,), generator=generator).tolist()
        found += [tuple(random), tuple((pattern * length)[:length]), (vocab_size - 1,) * length]
    return found


def drafters_of(made: Drafter | Seq[Drafter]) -> list[Drafter]:
    """The object that a plugin built, as a list of drafters that are asked in turn."""
    return [made] if isinstance(made, Drafter) else list(made)


@cache
def _loaded(path: str) -> tuple[TargetModel, Any]:
    return load_model(path, dtype="float64", device="cpu", max_model_len=MODEL_LEN)


@cache
def _registry() -> Registry:
    return Registry()


def _tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    return make(tokenizer_object=words, unk_token="w0")
