"""Makes a GGUF file of a Llama, with no tokenizer in it: prompts are token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["FTYPES", "gguf_of"]

FTYPES = {  # llama.cpp's numbers of file types
    "f32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18, "bf16": 32,
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_of(model: str, folder: Path, weights: str) -> Path:
    """The file of `model` in `folder` with such `weights`, made if it is not there. Its name follows the content.

    Raises:
        ValueError: the model is no Llama, or its weights have no such form.
    """
    if weights not in FTYPES:
        raise ValueError(f"weights={weights}: there are {', '.join(FTYPES)}")
    digest = hashlib.sha256()
    for file in [*sorted(Path(model).glob("*.safetensors")), Path(model) / "config.json"]:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    made = folder / f"{Path(model).name}-{weights}-{digest.hexdigest()[:12]}.gguf"
    if not made.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(".part")  # one that was cut off is not taken for whole
        if weights in ("f32", "bf16"):
            write(Path(model), part, weights)
        else:
            quantised(gguf_of(model, folder, "bf16"), part, weights)
        part.replace(made)
    return made


def quantised(source: Path, target: Path, weights: str) -> None:
    """Rounds `source` by llama.cpp's own program, all matrices alike."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = FTYPES[weights], True, 1
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), params):
        raise ValueError(f"llama.cpp cannot quantise {source} to {weights}")


def write(model: Path, target: Path, weights: str) -> None:
    import gguf

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{model} is a {config['model_type']}; only a llama can be written as GGUF here")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(FTYPES[weights])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors(model):
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        add(writer, name, values, {"q": heads, "k": kv_heads}, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, name: str, values: Any, heads: dict[str, int], weights: str) -> None:
    """Add a tensor under llama.cpp's name. `values` are bfloat16 as uint16, or float32."""
    import gguf
    import numpy as np

    inner = name.removesuffix(".weight")
    if inner.startswith("model.layers."):
        _, _, index, part = inner.split(".", 3)
        its = f"blk.{index}.{LAYER[part]}.weight"
        if (which := part[10:11]) in heads and part.startswith("self_attn."):  # its rotation pairs neighbours
            values = values.reshape(heads[which], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    else:
        its = f"{OUTER[inner]}.weight"
    if weights == "bf16" and values.ndim > 1:
        kind = gguf.GGMLQuantizationType.BF16
        short = values if values.dtype == np.uint16 else gguf.quantize(values, kind)
        writer.add_tensor(its, np.ascontiguousarray(short).view(np.uint8), raw_dtype=kind)
        return
    whole = (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values
    writer.add_tensor(its, np.ascontiguousarray(whole))


def tensors(model: Path) -> Any:
    """Names and values of all tensors, bfloat16 as uint16: NumPy has no bfloat16."""
    import numpy as np

    kinds = {"BF16": np.uint16, "F32": np.float32}
    for file in sorted(model.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int(data[:8].view(np.uint64)[0])
        for name, entry in json.loads(bytes(data[8:start])).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                raw = data[start + begin : start + end]
                yield name, np.frombuffer(raw.tobytes(), kinds[entry["dtype"]]).reshape(entry["shape"])
