"""A head that its target always agrees with is always accepted, and with any fault in what it is fed it is not.

Oracles: plain decoding and sampling by hand, without a cache. float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import emssd_eagle3.drafter
import pytest
import torch
from emssd_eagle3 import Eagle3Config, LayerIds, TreeKind
from emssd_eagle3.drafter import Eagle3Drafter
from emssd_eagle3.pairs import KnownPairs
from hypothesis import given
from hypothesis import strategies as st

from emssd.attention import PackedInputs
from emssd.decoding.caches import make_backend
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions, OnDrafterError
from emssd.decoding.packing import pack_nodes
from emssd.drafting import DrafterContext, HiddenStates, Outcome
from emssd.errors import ConfigError
from emssd.model import BorrowedTarget, TargetModel
from emssd.plugins.registry import Registry
from emssd.sampling import SamplingParams
from emssd.sequences import Generation, Request
from emssd.testing.oracle import References, greedy_reference
from tests.support import sampling as reference
from tests.support.heads import layer_weights, random_weights, write_head
from tests.support.perfect_head import SIZE, VOCAB, perfect_target, write_perfect_head

MODEL_LEN, NUM_NEW, DEPTH = 144, 31, 4
PROMPTS = [[1, 3, 4, 6, 0, 7, 8, 3], [6], [7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 3, 1, 4, 4, 0, 6, 7]]
KINDS: dict[str, list[SamplingParams | None]] = {
    "greedy": [None] * 4,
    "sampled": [SamplingParams(temperature=1 + row, seed=row) for row in range(4)],
    "mixed": [
        None,
        SamplingParams(temperature=6.0, seed=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=3.0, top_p=0.9, frequency_penalty=0.4, logit_bias={2: 3.0}, seed=2),
    ],
}
SHAPES = {"chain": {"tree": "chain"}, "dynamic": {"tree": "dynamic", "num_nodes": 14, "top_k": 3}}


@cache
def target() -> TargetModel:
    return TargetModel(perfect_target(MODEL_LEN))


@cache
def references() -> References:
    return References(target(), NUM_NEW)


@cache
def head_path() -> str:
    return write_perfect_head(Path(mkdtemp(prefix="emssd-head-")))


def make_engine(
    backend: Any = "ragged",
    *,
    drafter: Callable[[Eagle3Config, DrafterContext], Eagle3Drafter] = Eagle3Drafter.load,
    options: Mapping[str, Any] = SHAPES["dynamic"],
    **engine: Any,
) -> Engine:
    """An engine whose drafter has a cache of its own, as large as the target's."""
    chosen = EngineOptions(on_drafter_error=OnDrafterError.fail, **({"batch_size": 4} | engine))
    continuous = backend == "ragged"
    limit = None if chosen.kv_memory is None else int(chosen.kv_memory) // target().kv_cache_spec(1).bytes_per_token()
    spec = replace(target().kv_cache_spec(chosen.batch_size), continuous=continuous, max_tokens=limit)
    context = DrafterContext(
        VOCAB,
        None,
        lambda path: pytest.fail("asks for no model"),
        lambda name, values: pytest.fail("asks for no other"),
        "fail",
        BorrowedTarget(target()),
        spec,
        lambda own: make_backend(own, backend, Registry()),
    )
    made = drafter(Eagle3Config(**({"path": head_path(), "depth": DEPTH} | dict(options))), context)
    return Engine.assemble(target(), None, drafter=made, backend=backend, budget="fixed", options=chosen)


@cache
def text(name: str, prompt: tuple[int, ...], params: SamplingParams | None) -> tuple[int, ...]:
    if params is None:
        return references()[prompt]
    return reference.sampled(target().model, prompt, NUM_NEW, params, name)


def decode(engine: Engine, kinds: Seq[SamplingParams | None] = (None,) * 4) -> list[Generation]:
    """In order; every token is that of decoding by hand."""
    pairs = enumerate(zip(PROMPTS, kinds, strict=True))
    requests = [Request(str(row), tuple(ids), NUM_NEW, sampling=kind) for row, (ids, kind) in pairs]
    done = {generation.request_id: generation for generation in engine.run(requests)}
    for request in requests:
        expected = text(request.request_id, request.prompt_ids, request.sampling)
        assert done[request.request_id].token_ids == expected[:NUM_NEW]
    return [done[request.request_id] for request in requests]


def sure(config: Eagle3Config, context: DrafterContext) -> Eagle3Drafter:
    """Its trees have the likeliest token of every level, whatever else; with siblings of it that are expanded too."""
    drafter = Eagle3Drafter.load(config, context)
    drafter._shape.temperature = 0.01
    return drafter


def is_full(engine: Engine) -> bool:
    """Whether every draft was accepted down to its deepest node.

    A row gives one token in its first step, which has no draft, and then `DEPTH` + 1 in each, as far as it goes.
    """
    left = (NUM_NEW - 1) % (DEPTH + 1)
    wanted = {1: 4, DEPTH + 1: 4 * ((NUM_NEW - 1) // (DEPTH + 1))}
    if left:
        wanted[left] = wanted.get(left, 0) + 4
    return engine.report.acceptance_histogram == wanted


def test_the_text_is_worth_guessing() -> None:
    """It repeats itself late, no rounding decides it, and all of its last three tokens count."""
    texts = [text(str(row), tuple(prompt), None) for row, prompt in enumerate(PROMPTS)]
    assert len({each[place : place + 3] for each in texts for place in range(NUM_NEW - 2)}) > 30


@pytest.mark.parametrize("backend", ["ragged", "padded"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_that_is_always_right_is_always_accepted(shape: str, kinds: str, backend: str) -> None:
    engine = make_engine(backend, drafter=sure, options=SHAPES[shape])
    decode(engine, KINDS[kinds])
    assert is_full(engine)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_step_tokens", [5, 24])
def test_prompts_in_pieces(shape: str, max_step_tokens: int) -> None:
    engine = make_engine(drafter=sure, options=SHAPES[shape], max_step_tokens=max_step_tokens, batch_size=2)
    for generation in decode(engine):
        if shape == "chain":
            assert generation.num_accepted == generation.num_drafted
        assert generation.num_accepted > NUM_NEW // 2


def test_rows_that_are_preempted_begin_anew() -> None:
    limit = str(256 * target().kv_cache_spec(1).bytes_per_token())
    engine = make_engine(options=SHAPES["chain"], kv_memory=limit, max_step_tokens=16, batch_size=3)
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, 120, ignore_eos=True), strict=True):
        assert generation.token_ids == tuple(greedy_reference(target().model, prompt, 120))
        assert generation.num_accepted == generation.num_drafted > 0
    assert engine.report.num_preempted > 0


def other_embeddings(patch: pytest.MonkeyPatch) -> None:
    run = Eagle3Drafter._run

    def shifted(self: Any, packed: PackedInputs, features: torch.Tensor) -> torch.Tensor:
        return run(self, replace(packed, input_ids=packed.input_ids.roll(1)), features)

    patch.setattr(Eagle3Drafter, "_run", shifted)


def embeddings_of_the_feature(patch: pytest.MonkeyPatch) -> None:
    """Token i in the place of token i + 1, where the target has computed both."""
    begin = Eagle3Drafter._begin

    def shifted(self: Any, batch: Any, budget: Any) -> Any:
        return [replace(row, tokens=row.tokens[:-1]) for row in begin(self, batch, budget)]

    patch.setattr(Eagle3Drafter, "_begin", shifted)


def earlier_features(patch: pytest.MonkeyPatch) -> None:
    """The feature of token i - 1 in the place of that of token i."""
    add, latest = KnownPairs.add, dict[int, torch.Tensor]()

    def shifted(self: KnownPairs, start: int, features: torch.Tensor) -> None:
        before = latest[id(self)] if start else features[:1]
        latest[id(self)] = features[-1:]
        add(self, start, torch.cat([before, features])[:-1])

    patch.setattr(KnownPairs, "add", shifted)


def no_feedback(patch: pytest.MonkeyPatch) -> None:
    """Each level gets the outputs of another node than its parent."""
    compute = Eagle3Drafter._compute

    def shifted(self: Any, level: Any, before: Any, outputs: torch.Tensor) -> torch.Tensor:
        return compute(self, level, before, outputs.roll(1, 0))

    patch.setattr(Eagle3Drafter, "_compute", shifted)


def positions_of_trees(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def shifted(names: Any, ids: Any, lengths: Any, kv_lens: Any, trees: Any = None) -> PackedInputs:
            packed = pack_nodes(names, ids, lengths, kv_lens, trees)
            return packed if trees is None else replace(packed, position_ids=packed.position_ids + by)

        patch.setattr(emssd_eagle3.drafter, "pack_nodes", shifted)

    return plant


def positions_of_pairs(patch: pytest.MonkeyPatch) -> None:
    """Those of the newest pairs are one too high, as if counted with the prompt's first token."""

    def shifted(names: Any, ids: Any, lengths: Any, kv_lens: Any, trees: Any = None) -> PackedInputs:
        packed = pack_nodes(names, ids, lengths, kv_lens, trees)
        return packed if trees is not None else replace(packed, position_ids=packed.position_ids + 1)

    patch.setattr(emssd_eagle3.drafter, "pack_nodes", shifted)


def kv_of_rejected_nodes(patch: pytest.MonkeyPatch) -> None:
    """The tree's first nodes stay in the cache as the pairs of the tokens that came in their place."""
    propose, add = Eagle3Drafter.propose, KnownPairs.add

    def keep(self: Any, batch: Any, budget: Any) -> Any:
        commit, self._runner.commit = self._runner.commit, lambda kept: None
        draft = propose(self, batch, budget)
        self._runner.commit = commit
        return draft

    def added(self: KnownPairs, start: int, features: torch.Tensor) -> None:
        add(self, start, features)
        if start:
            self.num_cached += len(features) - 1

    patch.setattr(Eagle3Drafter, "propose", keep)
    patch.setattr(KnownPairs, "add", added)


def other_layers(patch: pytest.MonkeyPatch) -> None:
    observe = Eagle3Drafter.observe

    def shifted(self: Any, outcome: Outcome) -> None:
        hidden = outcome.hidden
        assert isinstance(hidden, HiddenStates)
        observe(self, replace(outcome, hidden=replace(hidden, states=hidden.states[-1:] + hidden.states[:-1])))

    patch.setattr(Eagle3Drafter, "observe", shifted)


FAULTS = {
    "other embeddings": other_embeddings,
    "embeddings of the feature": embeddings_of_the_feature,
    "earlier features": earlier_features,
    "another node's output fed back": no_feedback,
    "tree one position too deep": positions_of_trees(1),
    "tree one position too shallow": positions_of_trees(-1),
    "newest pairs one position too deep": positions_of_pairs,
    "KV of rejected nodes": kv_of_rejected_nodes,
    "other layers": other_layers,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_fed_wrongly_is_accepted_less_and_no_token_changes(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    engine = make_engine(drafter=sure)
    decode(engine)
    assert not is_full(engine)
    assert engine.report.num_drafted > 0


@cache
def random_head(seed: int) -> str:
    """A head that knows nothing: it reads two streams of the target, and drafts five tokens of nine."""
    config = {"hidden_size": SIZE, "intermediate_size": 8, "num_attention_heads": 3, "num_key_value_heads": 1}
    config |= {"vocab_size": VOCAB, "draft_vocab_size": 5, "eagle_aux_hidden_state_layer_ids": [0, 3]}
    norms = {f"midlayer.{name}.weight": (SIZE,) for name in ("input_layernorm", "hidden_norm")}
    sizes = {"fc.weight": (SIZE, 2 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (5, SIZE)}
    weights = random_weights(norms | sizes | layer_weights("midlayer.", config, 2 * SIZE), seed)
    weights["d2t"] = torch.tensor([0, 0, 1, 1, 4])
    return write_head(Path(mkdtemp(prefix="emssd-head-")), config, weights)


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple)
SAMPLING = st.sampled_from([None, None, *KINDS["sampled"], *KINDS["mixed"]])


@given(
    rows=st.lists(st.tuples(PROMPT, st.integers(1, NUM_NEW), SAMPLING), min_size=1, max_size=6),
    seed=st.integers(0, 2),
    shape=st.sampled_from(sorted(SHAPES)),
    backend=st.sampled_from(["ragged", "padded"]),
    batch_size=st.integers(1, 4),
    max_step_tokens=st.sampled_from([64, 6]),
)
def test_no_token_depends_on_the_head(
    rows: Any, seed: int, shape: str, backend: str, batch_size: int, max_step_tokens: int
) -> None:
    options = SHAPES[shape] | {"path": random_head(seed)}
    steps = {"max_step_tokens": max_step_tokens} if backend == "ragged" else {}
    engine = make_engine(backend, options=options, batch_size=batch_size, **steps)
    requests = [Request(str(row), prompt, num_new, sampling=kind) for row, (prompt, num_new, kind) in enumerate(rows)]
    for generation in engine.run(requests):
        prompt, num_new, kind = rows[int(generation.request_id)]
        assert generation.token_ids == text(generation.request_id, prompt, kind)[:num_new]


def test_a_step_that_failed_is_drafted_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(drafter=sure)
    run, calls = engine.runner.run, list[int]()

    def fails(packed: PackedInputs) -> Any:
        calls.append(1)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError("planted")
        return run(packed)

    monkeypatch.setattr(engine.runner, "run", fails)
    requests = [Request(str(row), tuple(prompt), NUM_NEW) for row, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    done = list[Any]()
    while engine.has_work:
        try:
            done += engine.step()
        except torch.OutOfMemoryError:
            continue
    for row in done:
        assert tuple(row.output_ids) == references()[row.request.prompt_ids][:NUM_NEW]
    assert is_full(engine)


def test_a_head_with_a_longest_row_drafts_no_further() -> None:
    path = write_perfect_head(
        Path(mkdtemp(prefix="emssd-head-")),
        max_position_embeddings=20,
        rope_scaling={"type": "dynamic", "factor": 2.0},
    )
    engine = make_engine(drafter=sure, options=SHAPES["dynamic"] | {"path": path})
    long = decode(engine)[3]
    assert 0 < long.num_accepted < 12


def kept_of(states: Iterable[int]) -> torch.Tensor:
    return torch.tensor([[float(state)] for state in states])


def test_pairs_are_kept_until_they_are_computed() -> None:
    pairs = KnownPairs()
    assert not pairs.covers(0)
    pairs.add(0, kept_of([0, 1]))
    pairs.add(2, kept_of([2]))
    assert pairs.covers(3)
    assert not pairs.covers(4)
    assert pairs.new(3).flatten().tolist() == [0, 1, 2]
    assert pairs.new(3).flatten().tolist() == [0, 1, 2]  # it failed, and is tried again
    pairs.computed(3)
    assert pairs.new(3).flatten().tolist() == [2]
    pairs.add(3, kept_of([3, 4]))
    assert pairs.new(5).flatten().tolist() == [3, 4]
    with pytest.raises(AssertionError, match="from position 4 on, and those before end at 5"):
        pairs.add(4, kept_of([4]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, "give drafter.path=FOLDER"),
        ({"tree": "static"}, "drafter.tree is 'static'; choose one of chain, dynamic"),
        ({"layer_ids": "outputs"}, "drafter.layer_ids is 'outputs'; did you mean 'output'"),
        ({"depth": 0}, "drafter.depth is 0; it must be at least 1"),
        ({"depth": 0, "tree": "chain"}, "drafter.depth is 0; it must be at least 1"),
        ({"num_nodes": 0}, "drafter.num_nodes is 0"),
        ({"path": "./nowhere"}, "there is no such folder"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(options=options)
    assert words in str(raised.value)


def test_it_is_offered() -> None:
    engine = Engine.assemble(
        target(),
        None,
        drafter=Eagle3Config(path=head_path(), depth=DEPTH, tree=TreeKind.chain, layer_ids=LayerIds.hs),
        backend="ragged",
        budget="fixed",
        options=EngineOptions(batch_size=4, on_drafter_error=OnDrafterError.fail),
    )
    decode(engine)
    assert is_full(engine)
