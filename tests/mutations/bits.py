"""Faults of what is batch-invariant."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

INVARIANT = "emssd/model/invariant.py"
ROWS = "tests/models/test_bits.py::test_tokens_and_log_probabilities_are_those_of_a_row_alone"
REPLACED = "tests/models/test_bits.py::test_what_is_replaced_gives_a_row_its_bits_in_any_batch"
TRAINER = "tests/models/test_batch_invariant.py::test_log_probabilities_of_a_trainer_are_those_of_the_rollout"
GRADIENTS = "tests/models/test_batch_invariant.py::test_gradients_are_those_of_the_model"

FAULTS = (
    Fault(
        "a single row goes to PyTorch's product",
        "bits",
        INVARIANT,
        "    if input.dtype not in _DTYPES or ",
        "    if input.numel() == input.shape[-1] or input.dtype not in _DTYPES or ",
        (ROWS, REPLACED),
    ),
    Fault(
        "where a sum begins depends on the rows beside it",
        "bits",
        "emssd/native/cpp/linear.cpp",
        "sum[row][vector] = Sums{};\n  }\n#pragma GCC unroll 1\n  for (int64_t cell",
        "sum[row][vector] = Sums{} + N * 1e-3f;\n  }\n#pragma GCC unroll 1\n  for (int64_t cell",
        (ROWS, REPLACED),
    ),
    Fault(
        "activations end in numbers that fill no vector",
        "bits",
        INVARIANT,
        "        if size == count:\n",
        "        if size:\n",
        (REPLACED,),
    ),
    Fault(
        "log-probabilities are computed in float32",
        "bits",
        "emssd/decoding/logprobs.py",
        "    scores = logits.double()\n",
        "    scores = logits.float()\n",
        (TRAINER,),
    ),
    Fault(
        "a trainer's positions count padding",
        "bits",
        "emssd/integrations/batch_invariant.py",
        "given = real.cumsum(1) - 1 if",
        "given = torch.arange(input_ids.shape[1]).expand_as(input_ids) if",
        (TRAINER,),
    ),
    Fault(
        "a layer that is computed again attends by other kernels",
        "bits",
        "emssd/integrations/batch_invariant.py",
        "(nullcontext(), _pass(target, keywords))",
        "(nullcontext(), nullcontext())",
        (GRADIENTS,),
    ),
    Fault(
        "a trainer's gradients let tokens see later ones",
        "bits",
        "emssd/integrations/batch_invariant.py",
        "is_causal=True",
        "is_causal=False",
        (GRADIENTS,),
    ),
    Fault(
        "what fills a rectangle gets gradients",
        "bits",
        "emssd/integrations/batch_invariant.py",
        " * real[..., None, None]",
        "",
        (GRADIENTS,),
    ),
    Fault(
        "a trainer's linear layers forget their bias",
        "bits",
        INVARIANT,
        "rows.sum(0) if wanted[2] else None",
        "None",
        (GRADIENTS,),
    ),
)
