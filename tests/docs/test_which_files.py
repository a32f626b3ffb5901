"""Files that the page about files says to load do load, with the tokens of Transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from emssd_testing.models import tiny_model
from tokenizers import Tokenizer, models
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from emssd import Engine
from emssd.data.chat import encode_chat
from emssd.errors import ConfigError

pytestmark = pytest.mark.docs
PROMPTS = [[5, 6, 7, 5, 6], [9], [8, 4, 8, 4, 8]]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(13)}, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(folder)


def save_bin(model: Any, folder: Path, num_files: int) -> None:
    """As versions of Transformers before safetensors did."""
    model.config.save_pretrained(folder)
    names = list(weights := model.state_dict())
    files = {f"pytorch_model-{i}.bin": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {"pytorch_model.bin": names}
    for file, part in files.items():
        torch.save({name: weights[name] for name in part}, folder / file)
    where = {name: file for file, part in files.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


SAVED = {
    "safetensors": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="10KB"),
    "bin": lambda model, folder: save_bin(model, folder, 1),
    "shards of bin": lambda model, folder: save_bin(model, folder, 3),
}


@pytest.mark.parametrize("kind", SAVED)
def test_a_folder_loads_whatever_its_weights_are_stored_as(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=13, dtype=torch.float32, std=0.3)
    SAVED[kind](model, tmp_path)
    save_tokenizer(tmp_path)
    outputs = Engine.from_pretrained(str(tmp_path), device="cpu").generate(PROMPTS, 12, ignore_eos=True)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "do_sample": False}
        assert list(output.token_ids) == model.generate(ids, max_new_tokens=12, **options)[0, len(prompt) :].tolist()


def test_a_tokenizer_without_a_fast_version_will_do(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=13, dtype=torch.float32).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0} | {c: i for i, c in enumerate("abcdefghijkl", 1)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"}')
    engine = Engine.from_pretrained(str(tmp_path), device="cpu")
    assert isinstance(engine.tokenizer, CTRLTokenizer)
    assert engine.generate(["ab"], 3)[0].text is not None


def test_a_file_and_a_folder_with_an_adapter_or_a_gguf_file_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "adapter_config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError):
            Engine.from_pretrained(str(path), device="cpu")


def test_a_chat_template_in_a_file_of_its_own_is_used(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert encode_chat([{"role": "user", "content": "w5"}], tokenizer) == [5]
