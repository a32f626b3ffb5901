"""A draft model of another tokenizer drafts by the text or by shared tokens, and changes nothing that is generated."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_draft_model import DraftModelConfig, TreeKind, Vocabulary
from emssd_draft_model.translated import Speech, TranslatedDrafter, shared_ids
from emssd_testing.models import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from emssd import Engine
from emssd.data.demo import model_path, prompts
from emssd.drafting import Drafter
from emssd.errors import ConfigError
from emssd.sampling import SamplingParams
from emssd.sequences import Generation

DRAFT = model_path("draft")
KINDS = [Vocabulary.text, Vocabulary.shared, Vocabulary.auto]


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("target"))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's draft model with all ids, and the name of the begin of a text, changed: the same texts."""
    folder = tmp_path_factory.mktemp("renamed")
    content = json.loads((DRAFT / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    new = {old: 2050 - old if old > 2 else old for old in vocab.values()}
    content["model"]["vocab"] = {name.replace("<s>", "<begin>"): new[old] for name, old in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content).replace('"<s>"', '"<begin>"'))
    about = (DRAFT / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(about.replace("<s>", "<begin>"))
    (folder / "config.json").write_text((DRAFT / "config.json").read_text())
    tensors = load_file(DRAFT / "model.safetensors")
    order = torch.tensor([new[token] for token in range(2048)])  # its own inverse
    for name, value in tensors.items():
        if value.shape[0] == 2048:
            tensors[name] = value[order].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose words are shorter, as it knows the first 300 of the merges alone."""
    folder = tmp_path_factory.mktemp("shorter")
    content = json.loads((DRAFT / "tokenizer.json").read_text())
    model = content["model"]
    model["merges"] = model["merges"][:300]
    merged = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]}
    names = [name for name in model["vocab"] if len(name) == 1 or name in merged or name.startswith("<")]
    model["vocab"] = {name: token for token, name in enumerate(names)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text((DRAFT / "tokenizer_config.json").read_text())
    tiny_model("llama", dtype=torch.float32, vocab_size=len(names), max_model_len=512).save_pretrained(folder)
    return folder


def run(drafter: Any, texts: list[str], temperature: float = 0.0, **options: Any) -> tuple[list[Generation], Engine]:
    sampling = SamplingParams(temperature=temperature, seed=5) if temperature else None
    engine = Engine.from_pretrained(str(model_path("target")), drafter=drafter, budget="fixed", batch_size=2, **options)
    return engine.generate(texts, max_new_tokens=24, sampling=sampling), engine


def tokens_of(done: list[Generation]) -> list[tuple[int, ...]]:
    return [row.token_ids for row in done]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_accepted_as_with_the_targets_own_tokenizer(kind: Vocabulary, temperature: float, renamed: Path) -> None:
    texts = [prompt.text for prompt in prompts(3)]
    plain, _ = run("none", texts, temperature)
    same, by_ids = run(DraftModelConfig(str(DRAFT)), texts, temperature)
    done, engine = run(DraftModelConfig(str(renamed), vocabulary=kind), texts, temperature)
    assert tokens_of(done) == tokens_of(same) == tokens_of(plain)
    by_ids_accepted, accepted = by_ids.report.num_accepted, engine.report.num_accepted
    if kind is Vocabulary.text:  # whose words end where drafts end
        assert accepted >= 0.7 * by_ids_accepted > 0
    else:
        assert accepted == by_ids_accepted > 0, "these are the same tokens, drawn with the same noise"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_any_vocabulary_leaves_tokens_as_they_are(
    kind: Vocabulary, temperature: float, shorter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, are_texts = TranslatedDrafter._settle, list[bool]()

    def checked(self: TranslatedDrafter, names: list[str]) -> None:
        settle(self, names)
        are_texts.extend(self._texts[name][: len(self._fed[name])] == self._fed[name] for name in names)

    monkeypatch.setattr(TranslatedDrafter, "_settle", checked)
    texts = ["Zwölf Boxkämpfer 🥊 and 日本語", "def f(x):\n    return", "</s> is no end <s>"]
    plain, _ = run("none", texts, temperature)
    done, engine = run(DraftModelConfig(str(shorter), vocabulary=kind), texts, temperature)
    assert tokens_of(done) == tokens_of(plain)
    assert engine.report.num_drafted > 0
    assert are_texts
    assert all(are_texts), "what has KV is the text of its row"
    drafter = engine.drafting.drafters[0].drafter
    assert isinstance(drafter, TranslatedDrafter)
    assert (drafter._shared is None) == (kind is not Vocabulary.shared)
    assert drafter._fed == drafter._texts == drafter._marks == drafter._cache.held == {}


def test_texts_come_back_whole_also_in_the_middle_of_words_and_characters(shorter: Path) -> None:
    other, target = (AutoTokenizer.from_pretrained(shorter), tokenizer())
    short, long = Speech(other, target), Speech(target, other)
    for text in ("Zwölf Boxkämpfer 🥊", "  x", "\n\n", "</s>"):
        ids = target(text, add_special_tokens=False)["input_ids"]
        for start in range(len(ids)):
            words = long.said(ids[start:])
            tokens = short.ids_of(words)
            assert tokens is None or short.said(tokens) == words
        assert short.ids_of(long.said(ids)) is not None
    assert short.ids_of("é".encode()[:1]) is None
    ids = shared_ids(short, long, len(other), len(target))
    assert all(own_id < 0 or short.bytes_of(own_id) == long.bytes_of(token) for token, own_id in enumerate(ids))
    assert sum(own_id >= 0 for own_id in ids) > 300


def test_what_is_not_possible_is_said(renamed: Path) -> None:
    def build(**options: Any) -> Drafter:
        return run(DraftModelConfig(str(renamed), **options), ["a"])[1].drafting.drafters[0].drafter

    with pytest.raises(ConfigError, match=r"not the target's .* drafter\.vocabulary=auto lets one with another"):
        build()
    with pytest.raises(ConfigError, match=r"vocabulary is auto, which drafts chains .* set drafter\.tree=chain"):
        build(vocabulary=Vocabulary.auto, tree=TreeKind.static)
