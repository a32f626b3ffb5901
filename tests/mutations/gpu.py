"""Faults of steps on a GPU: waits, recordings, and kernels that are fused."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

PLANNED = "plugins/flashinfer/emssd_flashinfer/planned.py"
FUSED = "plugins/flashinfer/emssd_flashinfer/fused.py"
TRACED = "plugins/flashinfer/emssd_flashinfer/traced.py"
SOURCE = "plugins/flashinfer/emssd_flashinfer/kernel_source.py"
LANES = "emssd/drafters/lanes.py"
TESTS = "tests/backends/test_flashinfer_fused.py::"
ON_DEVICE = (
    "tests/pretended/test_engine.py::test_tokens_are_those_of_the_cpu_and_the_host_waits_once_a_step_and_once_a_level",
)

FAULTS = (
    Fault(
        "the host waits once more in a step",
        "gpu",
        PLANNED,
        "        static.done()\n",
        "        static.done()\n        metadata.slots.max().item()\n",
        ON_DEVICE,
    ),
    Fault(
        "a tensor is made from numbers while a graph is recorded",
        "gpu",
        PLANNED,
        "write_kv(keys, values, step.slots, key, value)",
        "write_kv(keys, values, step.slots + torch.tensor([0], device=key.device), key, value)",
        ON_DEVICE,
    ),
    Fault(
        "a head's recording reads the inputs that it was recorded with",
        "gpu",
        LANES,
        "        held[: len(values)] = values\n",
        "        self._fixed[name] = held = values if len(values) == size else held\n",
        (TESTS + "test_a_recorded_head_computes_what_it_is_fed",),
    ),
    Fault(
        "a block's recording reads no features",
        "gpu",
        "plugins/dflash/emssd_dflash/lane.py",
        '                    ("features", features, sizes.features),\n',
        '                    ("features", features * 0, sizes.features),\n',
        (ON_DEVICE[0] + "[dflash-greedy-recorded]",),
    ),
    Fault(
        "a row that has ended writes to its KV in the later passes of a chain",
        "gpu",
        PLANNED,
        "            pages.slots[ended] = self._scrap_slots[: len(ended)]\n",
        "",
        (
            "tests/backends/test_flashinfer_graphs.py::test_passes_of_chains_are_planned_beforehand_and_ended_rows_write_to"
            "_the_page_of_padding",
        ),
    ),
    Fault(
        "the passes of a chain are all fed with its first token",
        "gpu",
        "emssd/model/runner.py",
        "            return both, both[0].long()\n",
        "            return both, ids\n",
        (ON_DEVICE[0] + "[early_exit-greedy-recorded]",),
    ),
    Fault(
        "a chain drafts its first token again and again",
        "gpu",
        "emssd/drafters/levels.py",
        "        both[:, 1:, index] = found\n",
        "",
        (ON_DEVICE[0] + "[early_exit-greedy-recorded]",),
    ),
    Fault(
        "sampled and greedy steps share recordings",
        "gpu",
        PLANNED,
        "(size, masked, packed.greedy, num_passes)",
        "(size, masked, num_passes)",
        ("tests/pretended/test_engine.py::test_greedy_and_sampled_steps_of_a_size_are_recorded_apart",),
    ),
    Fault(
        "the host reads greedy tokens before they have come",
        "gpu",
        "emssd/attention/packed.py",
        "        if values.is_pinned():\n",
        "        if False:\n",
        (ON_DEVICE[0] + "[none-greedy-recorded]",),
    ),
    Fault(
        "a mask's rows begin where FlashInfer's plan says",
        "gpu",
        "plugins/flashinfer/emssd_flashinfer/kernels.py",
        "        if mask is not None:\n            self._write(",
        "        if False:\n            self._write(",
        ("tests/backends/test_flashinfer_trees.py::test_flashinfers_masked_wrappers_of_recorded_steps_do_too",),
    ),
    Fault(
        "a model that keeps states is recorded with those of the first rows",
        "gpu",
        "emssd/model/runner.py",
        "            plan = replace(plan, replay=None)  # a recording",
        "            pass  # a recording",
        (TESTS + "test_a_model_that_keeps_states_is_not_recorded",),
    ),
    Fault(
        "a pass that cannot be recorded is recorded in each step",
        "gpu",
        PLANNED,
        "                self._ladder = ()\n",
        "",
        (TESTS + "test_a_model_that_cannot_be_recorded_runs_without_a_graph",),
    ),
    Fault(
        "a fused kernel does not round between its operations",
        "gpu",
        SOURCE,
        'f"({text}).to({_TYPES[value.dtype]}).to(tl.float32)"',
        "text",
        (TESTS + "test_a_kernel_rounds_after_each_of_its_operations",),
    ),
    Fault(
        "fused operations move behind what writes in place",
        "gpu",
        FUSED,
        "        if op.writes or reads_waiting:\n",
        "        if reads_waiting:\n",
        (TESTS + "TestRefusals::test_what_writes_in_place_stays_in_its_order",),
    ),
    Fault(
        "fused kernels are not compared with the pass that they replace",
        "gpu",
        FUSED,
        "        if _same_bits(run(fewer, results), expected):\n",
        "        if run(fewer, results) is not None:\n",
        (TESTS + "TestRefusals::test_kernels_that_round_otherwise_are_not_used",),
    ),
    Fault(
        "joined products are not compared with those apart",
        "gpu",
        FUSED,
        "if ops is not plain and not _same_bits(run(ops, seen, look=True), run(plain, seen)):",
        "if ops is not plain and run(ops, seen, look=True) is None:",
        (TESTS + "TestRefusals::test_a_product_that_rounds_otherwise_stays_apart",),
    ),
    Fault(
        "a number that the host reads is part of a trace",
        "gpu",
        TRACED,
        "        if not all(isinstance(each, torch.Tensor) for each in tree_leaves(out)):\n",
        "        if False:\n",
        (TESTS + "TestRefusals::test_a_pass_that_its_trace_would_not_do_again_is_left",),
    ),
    Fault(
        "a function whose last bit differs is fused",
        "gpu",
        "plugins/flashinfer/emssd_flashinfer/triton_kernels.py",
        "                found.add(function)\n",
        "                pass\n",
        (TESTS + "test_functions_whose_last_bit_differs_are_found",),
    ),
)
