"""Continuous batches give the tokens of plain greedy decoding, exactly: any arrivals, chunks, preemptions and budgets.

Oracle: `greedy_reference`, eager attention without a cache, float64, of equal logits the lowest id.
"""

from __future__ import annotations

from typing import Any

import pytest
from emssd_adaptive.policy import AdaptiveBudget
from emssd_ragged.backend import ragged_backend
from hypothesis import strategies as st

from emssd.attention import AttentionBackend, PagedBackend
from emssd.drafting import BudgetPolicy
from emssd.testing.models import tiny_model
from emssd.testing.strategies import policies
from tests.support.engine_machine import EngineMachine
from tests.support.preemption import run_with_preemption
from tests.support.reference_kernels import ReferenceKernels, rerun


class DenseMachine(EngineMachine):
    """The dense reference, which asserts what the engine owes to a backend."""


class RaggedMachine(EngineMachine):
    @classmethod
    def make_model(cls) -> Any:
        return tiny_model("mistral", vocab_size=11, max_model_len=64)

    def make_backend(self, page_size: int) -> AttentionBackend:
        return ragged_backend(page_size, kernels="torch")

    def policies(self) -> st.SearchStrategy[BudgetPolicy]:
        adaptive = st.builds(AdaptiveBudget, memory=st.sampled_from([1.0, 16.0]), probe_interval=st.integers(1, 4))
        return policies() | adaptive


class FusedMachine(RaggedMachine):
    """Pages are of 16 tokens whatever is drawn; narrow heads are padded, so a page takes more bytes than its tokens."""

    max_kv_tokens = 120  # as half of the values' room is padding of narrow heads

    def make_backend(self, page_size: int) -> AttentionBackend:
        return ragged_backend(kernels="fused")


class PagedMachine(RaggedMachine):
    max_kv_tokens = 160  # of which half is padding of narrow heads, and a page that of tokens

    def make_backend(self, page_size: int) -> AttentionBackend:
        return PagedBackend(
            ReferenceKernels(capture=rerun, max_graph_tokens=12), page_size=page_size, memory_fraction=1.0
        )


@pytest.mark.parametrize("machine", [DenseMachine, RaggedMachine, FusedMachine, PagedMachine])
@pytest.mark.hypothesis
def test_any_arrivals_chunks_preemptions_and_budgets_give_the_tokens_of_greedy_decoding(
    machine: type[EngineMachine],
) -> None:
    run_with_preemption(machine, share=6, num_steps=16)
