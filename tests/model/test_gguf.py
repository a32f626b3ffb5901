"""Models of GGUF files: every type of block, names and orders of tensors, texts, and files that are refused.

Oracles: `gguf.dequantize`, and the dense model that Transformers makes of the same file.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emssd_draft_model import DraftModelConfig
from emssd_testing.models import tiny_model
from transformers.modeling_gguf_pytorch_utils import GGUFTensor, TensorProcessor

from emssd import Engine
from emssd.data.model_folder import gguf_of
from emssd.errors import ConfigError
from emssd.model import ModelOptions, load_model, load_tokenizer
from emssd.model.compile import packed
from emssd.model.load.checkpoint import files_of
from emssd.model.load.checkpoint_files import content_digest
from emssd.model.load.gguf_blocks import KINDS, rounded_of
from emssd.model.load.gguf_header import Stored
from emssd.model.load.gguf_model import _order

gguf = pytest.importorskip("gguf", reason="gguf reads the blocks that are compared; pip install 'emssd[gguf]'")
HALVES = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}  # where a block has float16; others have two
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "std": 0.3}
VOCAB = ["<unk>", "<s>", "</s>", *map(chr, range(65, 125))]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """``[rows, bytes]`` of `columns` numbers about 0.1 large each."""
    random = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
    for start in HALVES.get(kind, (0, 2)):
        scale = 0.002 * random.normal(size=(len(blocks), 1)) / (1 if numbers == 32 else 20)
        blocks[:, start : start + 2] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_file(
    file: Path,
    model_type: str = "llama",
    kinds: Any = tuple(KINDS),
    architecture: str = "",
    more: str = "",
    **sizes: Any,
) -> Path:
    """A model whose matrices have blocks of `kinds` in turn."""
    model = tiny_model(model_type, vocab_size=len(VOCAB), dtype=torch.float32, **(SIZES | sizes))
    config = model.config
    arch = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture or arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_key_length(64)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(VOCAB)
    writer.add_token_scores([0.0] * len(VOCAB))
    writer.add_token_types([2, 3, 3, *[1] * (len(VOCAB) - 3)])
    writer.add_eos_token_id(2)
    for number, (name, weight) in enumerate(model.named_parameters()):
        stem, _, suffix = name.rpartition(".")
        name = f"{names.get_name(stem)}.{suffix}"
        if weight.ndim == 1:
            writer.add_tensor(name, 1 + 0.1 * np.random.default_rng(number).normal(size=len(weight)).astype(np.float32))
            continue
        kind = kinds[number % len(kinds)]
        blocks = random_blocks(kind, len(weight), weight.shape[1], number)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    if more:
        writer.add_tensor(more, np.linspace(1, 2, 32, dtype=np.float32))
    if (scaling := sizes.get("rope_scaling", {})).get("rope_type") == "llama3":  # as llama.cpp's converter writes it
        rotary: Any = model.model.rotary_emb
        divisors = rotary.compute_default_rope_parameters(config)[0] / rotary.inv_freq
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    elif scaling:
        writer.add_string(f"{arch}.rope.scaling.type", scaling["rope_type"])
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_numbers_of_the_format(kind: str) -> None:
    """To the bit: both multiply in float32, and then add in float32."""
    blocks = random_blocks(kind, 6, 768)
    weight = rounded_of(torch.from_numpy(blocks), kind)
    scale, minimum = (
        torch.zeros(1) if part is None else part.float().repeat_interleave(768 // part.shape[1], 1)
        for part in (weight.scale, weight.minimum)
    )
    numbers = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal((weight.values * scale + minimum).numpy(), numbers)
    assert weight.bits == 8 or int(weight.values.amax() - weight.values.amin()) == 15


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2"])
def test_a_packed_file_has_the_weights_that_transformers_reads(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a rounding: without kernels the numbers are dense, and rounded once."""
    monkeypatch.setattr(packed, "has_packed_kernel", lambda _: False)
    file = write_file(tmp_path / "tiny.gguf", model_type)
    (target, _), (dense, _) = (
        load_model(ModelOptions(str(file), weights=weights, dtype="float32", device="cpu", compile=False))
        for weights in ("auto", "dense")
    )
    weights, others = target.model.state_dict(), dense.model.state_dict()
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-6, atol=1e-7, msg=name)
    tied = target.model.lm_head.weight is target.model.get_input_embeddings().weight
    assert tied == (model_type == "gemma3_text")
    assert "quantization_config" not in dense.model.config.to_dict()


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("llama", {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.5}),
        ("gemma3_text", {"rope_type": "linear", "factor": 8.0}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0}),
    ],
    ids=["Llama 3", "another of its kind", "linear", "YaRN"],
)
@pytest.mark.parametrize("weights", ["auto", "dense"])
def test_rotary_frequencies_are_those_of_the_model_that_was_converted(
    weights: str, model_type: str, scaling: Any, tmp_path: Path
) -> None:
    """To the bit."""
    if model_type != "gemma3_text":
        scaling |= {"original_max_position_embeddings": 64}
    file = write_file(tmp_path / "tiny.gguf", model_type, kinds=["Q8_0"], rope_scaling=scaling)
    target, _ = load_model(ModelOptions(str(file), weights=weights, device="cpu", compile=False))
    buffers = dict(target.model.named_buffers())
    converted = tiny_model(model_type, vocab_size=len(VOCAB), **(SIZES | {"rope_scaling": scaling}))
    right = {name: part for name, part in converted.named_buffers() if "inv_freq" in name}
    assert right
    assert all(torch.equal(buffers[name], part) for name, part in right.items())


@pytest.mark.parametrize(
    ("change", "packed_rows"),
    [
        (lambda rows: rows, slice(None)),
        (lambda rows: rows[::-1], [3, 2, 1, 0]),
        (lambda rows: rows - 1, None),
        (lambda rows: rows.T, None),
    ],
    ids=["nothing", "an order", "values", "columns"],
)
def test_only_an_order_of_rows_is_left_to_a_packed_matrix(change: Any, packed_rows: Any) -> None:
    class Processor(TensorProcessor):  # type: ignore[misc]
        def process(self, weights: Any, name: str, **_: Any) -> Any:
            return GGUFTensor(change(weights), name, {})

    order = _order(Processor(), Stored("blk.0.ffn_up.weight", (4, 256), 8, 0))
    assert (order if order is None or isinstance(order, slice) else order.tolist()) == packed_rows


def test_a_file_as_draft_model_and_its_own_text_as_the_draft(tmp_path: Path) -> None:
    """A model that drafts for itself is right: what it drafts is what it says."""
    file = str(write_file(tmp_path / "tiny.gguf"))
    drafter = DraftModelConfig(file)
    plain, drafted = (
        Engine.from_pretrained(file, device="cpu", drafter=name).generate([[5, 6, 7]], 12, ignore_eos=True)
        for name in ("none", drafter)
    )
    assert plain[0].token_ids == drafted[0].token_ids
    with pytest.raises(ConfigError, match=r"leave model\.weights=int8 out"):
        Engine.from_pretrained(file, weights="int8")


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_drafts_and_batches_leave_the_text_of_a_packed_file(model_type: str, tmp_path: Path) -> None:
    file = write_file(tmp_path / "tiny.gguf", model_type)
    prompts = [[5, 6, 7, 5, 6], [9], [8, 4, 8, 4, 8]]
    engine = Engine.from_pretrained(str(file), device="cpu", drafter="suffix", batch_size=3)
    for prompt, output in zip(prompts, engine.generate(prompts, 12, ignore_eos=True), strict=True):
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "do_sample": False}
        text = engine.target.model.generate(ids, max_new_tokens=12, **options)[0, len(prompt) :]
        assert list(output.token_ids) == text.tolist()


def test_the_file_of_a_folder_and_its_tokenizer(tmp_path: Path) -> None:
    one = write_file(tmp_path / "one.gguf", kinds=["Q8_0"])
    assert gguf_of(str(one)) == gguf_of(str(tmp_path)) == one
    before = content_digest(files_of(str(one))[0])
    folder = Path(load_tokenizer(str(tmp_path)).name_or_path)
    assert folder.parent.name == "gguf-tokenizer"
    folder.joinpath("mark").touch()
    assert Path(load_tokenizer(str(one)).name_or_path, "mark").exists(), "it was converted once, and kept"
    two = write_file(tmp_path / "two.gguf", kinds=["Q4_0"])
    with pytest.raises(ConfigError, match=r"model\.gguf_file: one\.gguf, two\.gguf"):
        gguf_of(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no three\.gguf in it"):
        gguf_of(str(tmp_path), "three.gguf")
    assert gguf_of(str(tmp_path), "two.gguf") == two
    assert [content_digest(file) for file in files_of(str(tmp_path), "two.gguf")] != [before]
    load_tokenizer(str(two)).save_pretrained(tmp_path)
    assert Path(load_tokenizer(str(one)).name_or_path) == tmp_path != folder, "one beside the file is preferred"


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: file.write_bytes(b"text"), "is no GGUF file"),
        (lambda file: file.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "is GGUF version 1"),
        (lambda file: cut(write_file(file), 200), "is damaged or not complete"),
        (lambda file: cut(write_file(file), -5000), "ends within .*; copy or download it again"),
        (lambda file: write_file(file, kinds=["Q2_K"]), "blocks of type Q2_K, and emssd packs .*; model.weights=dense"),
        (lambda file: write_file(file, more="rope_factors_long.weight"), "rope_factors_long.weight have no place"),
        (lambda file: write_file(file, more="rope_freqs.weight"), r"other divisors .* than Llama 3's"),
        (
            lambda file: write_file(file, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "is dynamic by factor, .*; emssd reads linear",
        ),
        (lambda file: write_file(file, head_dim=128), "have another shape than config.json says"),
        (
            lambda file: write_file(file, architecture="rwkv7"),
            "of architecture 'rwkv7', and Transformers converts .*qwen3",
        ),
    ],
    ids=[
        "another file",
        "an old version",
        "a cut header",
        "cut tensors",
        "another type",
        "another tensor",
        "other divisors",
        "another rotary scaling",
        "another shape",
        "another architecture",
    ],
)
def test_files_that_are_refused(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=words):
        load_model(ModelOptions(str(tmp_path), device="cpu"))
