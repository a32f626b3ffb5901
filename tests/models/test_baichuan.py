"""The example that makes a Llama of Baichuan's 7B models, on a tiny one in their layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from emssd.testing.models import tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "baichuan_to_llama.py"


@pytest.mark.parametrize(("vocab_size", "suffix"), [(64000, "safetensors"), (125696, "bin")], ids=["1", "2"])
def test_its_logits_are_those_of_the_checkpoint(vocab_size: int, suffix: str, tmp_path: Path) -> None:
    llama: Any = tiny_model("llama", num_key_value_heads=4, tie_word_embeddings=False)
    weights = {name: weight.clone() for name, weight in llama.state_dict().items()}
    for layer in range(llama.config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        parts = [weights.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        weights[f"{attention}W_pack.weight"] = torch.cat(parts)
    source, made = tmp_path / "baichuan", tmp_path / "llama"
    source.mkdir()
    config = llama.config.to_dict() | {
        "vocab_size": vocab_size,
        "model_type": "baichuan",
        "auto_map": {"AutoModel": "x"},
    }
    (source / "config.json").write_text(json.dumps(config))
    if suffix == "bin":
        torch.save(weights, source / "pytorch_model.bin")
    else:
        save_file(weights, source / "model.safetensors")
    subprocess.run([sys.executable, str(EXAMPLE), str(source), str(made)], check=True)

    written = json.loads((made / "config.json").read_text())
    assert "auto_map" not in written
    (made / "config.json").write_text(json.dumps(written | {"vocab_size": llama.config.vocab_size}))
    model: Any = LlamaForCausalLM.from_pretrained(made, dtype=torch.float64)
    if vocab_size == 125696:  # Baichuan2's NormHead
        llama.lm_head.weight.data = torch.nn.functional.normalize(llama.lm_head.weight.data)
    tokens = torch.tensor([[3, 5, 4, 7, 6]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, llama(tokens).logits, rtol=0, atol=1e-12)


def test_those_of_13b_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 5120}')
    done = subprocess.run([sys.executable, str(EXAMPLE), str(tmp_path), str(tmp_path / "made")], capture_output=True)
    assert done.returncode == 1
    assert b"ALiBi" in done.stderr
    assert not (tmp_path / "made").exists()
