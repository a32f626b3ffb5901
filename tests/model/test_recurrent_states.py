"""Layers that keep a state: each token is that of the recurrence written out, whatever was drafted and batched."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache

import pytest
import torch
from emssd_self_draft import SelfConfig
from emssd_testing.models import HYBRIDS, tiny_model

from emssd.attention import Kept
from emssd.errors import ConfigError, UnsupportedModelError
from emssd.model.hf import recurrent_pass
from emssd.model.hf.recurrent_layers import _PASS, keeps_states
from emssd.model.hf.recurrent_pass import Recurrence, StatePass
from emssd.model.hf.recurrent_states import RowTokens, StateCache
from tests.support.texts import NEW_TOKENS, PROMPTS, VOCAB_SIZE, Texts
from tests.support.tiers import looped
from tests.support.trees import DecoyDrafter

EVERY_ARITHMETIC = pytest.mark.parametrize("arithmetic", ["C++", "PyTorch"], indirect=True)

Text = list[int]  # of a token, all that it feeds is drawn from its number


@cache
def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 1000), dtype=torch.float64)


class Layers:
    """A model of one convolution and three recurrences, of tokens alone."""

    channels, heads, keys, values = 5, 2, 3, 70  # more values than the kernel takes at a time

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight, self.bias = self.numbers(-1, self.channels, 4), self.numbers(-2, self.channels)
        self.rates = -self.numbers(-3, self.keys, self.values).exp()

    def numbers(self, seed: int, *shape: int) -> torch.Tensor:
        return drawn(seed, shape).to(self.dtype)

    def fed(self, tokens: Text) -> tuple[torch.Tensor, Recurrence, Recurrence, Recurrence]:
        def of(kind: int, *shape: int) -> torch.Tensor:
            return torch.stack([self.numbers(10 * token + kind, *shape) for token in tokens])

        heads, keys, values = self.heads, self.keys, self.values
        query, key, value = of(0, heads, keys), of(1, heads, keys), of(2, heads, values)
        by_head, by_key = -of(3, heads, 1, 1).exp(), -of(4, heads, keys, 1).exp()
        by_value, beta = of(5, heads, 1, values).exp(), of(6, heads).sigmoid()
        return (
            of(7, self.channels),
            Recurrence(query, key, value, by_head),
            Recurrence(query, key, value, by_key, beta),
            Recurrence(query, key, value, by_value, rates=self.rates),
        )

    def mixed(self, tokens: Text) -> torch.Tensor:
        """``[n, numbers]`` of fed tokens, by the ops of this pass."""
        ops: StatePass | None = _PASS.get()
        assert ops is not None
        first, *rest = self.fed(tokens)
        return torch.cat([ops.convolve(first, self.weight, self.bias), *(ops.recur(one).flatten(1) for one in rest)], 1)

    def expected(self, text: Text) -> torch.Tensor:
        """The same of the last token of a text, written out."""
        first, *rest = self.fed(text)
        out = self.bias.clone()
        for back, values in enumerate(first.flip(0)[:4]):
            out += values * self.weight[:, 3 - back]
        outputs = [out]
        for inputs in rest:
            state = torch.zeros(self.heads, self.keys, self.values, dtype=self.dtype)
            for at in range(len(text)):
                state *= (inputs.decay[at] * (1 if inputs.rates is None else inputs.rates)).exp()
                value = inputs.value[at]
                if inputs.beta is not None:
                    value = (value - torch.einsum("hk,hkv->hv", inputs.key[at], state)) * inputs.beta[at][:, None]
                state += torch.einsum("hk,hv->hkv", inputs.key[at], value)
            outputs.append(torch.einsum("hk,hkv->hv", inputs.query[-1], state).flatten())
        return torch.cat(outputs)


class History:
    """Rows that grow in a `StateCache` by drafts that are right or wrong, as chains and trees, in pieces and anew."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random, self.layers, self.cache = random.Random(seed), Layers(dtype), StateCache(max_rows=1)
        self.texts: dict[str, Text] = {}  # committed, with their last token, which was not fed yet
        self.num_fed: dict[str, int] = {}
        self.seen: list[tuple[Text, torch.Tensor]] = []  # texts that ended in some pass, and what it gave there

    def step(self) -> None:
        rng, feeds, fed = self.random, dict[str, RowTokens](), Text()
        nodes: dict[str, list[Text]] = {}
        for name in rng.sample("abc", rng.randint(1, 3)):
            text = self.texts.setdefault(name, [rng.randrange(9) for _ in range(rng.randint(1, 6))])
            start = self.num_fed.get(name, 0)
            tree = self.tree()
            new = text[start:] + [rng.randrange(9) for _ in tree]
            paths = [text[: at + 1] for at in range(start, len(text))]
            for node, parent in enumerate(tree):
                before = text if parent < 0 else paths[len(text) - start + parent]
                paths.append([*before, new[len(text) - start + node]])
            places = range(len(fed), len(fed) + len(new))
            chain = all(parent == node - 1 for node, parent in enumerate(tree))
            feeds[name] = RowTokens(tuple(places), start + len(new), len(tree), () if chain else tuple(tree))
            fed, nodes[name] = fed + new, paths
        out = self.run(feeds, fed)
        for name, feed in feeds.items():
            self.seen += zip(nodes[name], out[list(feed.places)], strict=True)
        if rng.random() < 0.1:
            return  # a step that was not committed
        for name, feed in feeds.items():
            self.commit(name, feed, nodes[name])

    def run(self, feeds: dict[str, RowTokens], fed: Text) -> torch.Tensor:
        if self.random.random() < 0.1:
            with suppress(ZeroDivisionError), self.cache.pass_of(feeds):
                self.layers.mixed(fed)
                raise ZeroDivisionError  # nothing of this pass may stay
        with self.cache.pass_of(feeds):
            return self.layers.mixed(fed)

    def commit(self, name: str, feed: RowTokens, paths: list[Text]) -> None:
        """Some path from the text to a node is right, and the token after it."""
        rng, text, num_nodes = self.random, self.texts[name], feed.num_drafts
        first = feed.kv_len - num_nodes
        node, path = rng.randint(-1, num_nodes - 1), list[int]()
        while node >= 0:
            path.insert(0, node)
            node = feed.parent(first + node) - first
        self.texts[name] = [*(text if not path else paths[len(paths) - num_nodes + path[-1]]), rng.randrange(9)]
        moved = () if path == [*range(len(path))] else tuple(first + node for node in path)
        self.cache.commit(Kept((name,), (first + len(path),), (moved,)))
        self.num_fed[name] = first + len(path)
        if rng.random() < 0.1:
            self.cache.release([name])
            del self.num_fed[name]

    def tree(self) -> list[int]:
        rng, size = self.random, self.random.choice((0, 0, 1, 4, 6))
        return [*range(-1, size - 1)] if rng.random() < 0.4 else [rng.randint(-1, node - 1) for node in range(size)]


@pytest.fixture
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "PyTorch":
        monkeypatch.setattr(recurrent_pass, "why_unavailable", lambda: "as a test wants it")
    return str(request.param)


@EVERY_ARITHMETIC
@looped("seed", range(3))
def test_every_token_is_that_of_the_recurrence_written_out(seed: int, arithmetic: str) -> None:
    history = History(seed, torch.float64)
    for _ in range(12):
        history.step()
    for text, out in history.seen:
        torch.testing.assert_close(out, history.layers.expected(text), rtol=1e-9, atol=1e-9)
    assert len(history.seen) > 30
    history.cache.release("abc")
    assert history.cache.used_bytes == 0


@EVERY_ARITHMETIC
@looped("seed", range(3, 5))
def test_the_bits_of_a_token_depend_on_its_text_alone(seed: int, arithmetic: str) -> None:
    history = History(seed, torch.float32)
    for _ in range(12):
        history.step()
    for text, out in history.seen:
        with StateCache().pass_of({"": RowTokens(tuple(range(len(text))), len(text), 0)}):
            assert torch.equal(history.layers.mixed(text)[-1], out)


@cache
def texts_of(architecture: str) -> Texts:
    prompts = (PROMPTS[0][:12], *PROMPTS[1:])
    return Texts(tiny_model(architecture, vocab_size=VOCAB_SIZE, max_model_len=64), prompts)


@pytest.mark.costly("three runs of each architecture")
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_tokens_are_those_of_the_forward_pass(architecture: str) -> None:
    texts_of(architecture).try_every_draft()


def test_rows_that_are_preempted_begin_again_and_states_count_as_memory() -> None:
    texts = texts_of("qwen3_5_text")
    texts.try_preemption("44KiB")
    with pytest.raises(ConfigError, match=r"states of 3 rows, which take .* MiB, and KV"):
        texts.engine("none", kv_memory="20KiB")
    engine = texts.decoded(texts.engine("none"))
    assert engine.report.kv_usage.peak_held >= 3 * engine.target.bytes_per_row > 0


def test_drafters_with_a_model_have_states_of_their_own() -> None:
    texts = texts_of("qwen3_5_text")
    assert texts.decoded(texts.engine("early_exit")).report.num_drafted > NEW_TOKENS


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_targets_first_layers_draft_on_its_own_states(architecture: str) -> None:
    texts = texts_of(architecture)
    layers = texts.model.config.num_hidden_layers - 1
    assert texts.decoded(texts.engine(SelfConfig(layers=layers))).report.num_drafted > NEW_TOKENS


def test_a_state_that_is_lost_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = StatePass._slots_of
    monkeypatch.setattr(StatePass, "_slots_of", lambda *arguments: kept(*arguments).zero_())
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        texts_of("qwen3_5_text").engine("none")


def test_a_layer_that_attends_twice_has_kv_for_each_time() -> None:
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, max_model_len=64)
    model.model.layers[1] = model.model.layers[0]
    texts = Texts(model)
    assert len(texts.decoded(texts.engine(DecoyDrafter(VOCAB_SIZE, texts.known))).target.layers) == 2


def test_it_is_not_compiled() -> None:
    with pytest.warns(RuntimeWarning, match="keep a state, or attend twice"):
        texts_of("lfm2").engine("none", compile=True)


def test_a_class_without_such_functions_keeps_no_states() -> None:
    assert keeps_states(type(texts_of("lfm2").model))
    assert not keeps_states(type(tiny_model("llama")))
