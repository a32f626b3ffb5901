"""Faults of layers that keep a state."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

STATES = "emssd/model/states.py"
MIXING = "emssd/model/mixing.py"
KERNEL = "emssd/native/cpp/recurrence.cpp"
WRITTEN_OUT = "tests/models/test_states.py::test_every_token_is_that_of_the_recurrence_written_out"
PER_ROW = "emssd/model/per_row.py"
ROW_BY_ROW = "tests/models/test_per_row.py::test_tokens_are_those_of_the_forward_pass"
FORWARD = "tests/models/test_states.py::test_tokens_are_those_of_the_forward_pass"

FAULTS = (
    Fault(
        "inputs of a rejected sibling stay in the place of the accepted node's",
        "states",
        STATES,
        "for index in moved))",
        "for index in range(num_fixed, kv_len)))",
        (WRITTEN_OUT,),
    ),
    Fault(
        "the last token of an adopted state is applied twice",
        "states",
        STATES,
        "row = replace(row, at=self.ahead, flipped",
        "row = replace(row, at=self.ahead - 1, flipped",
        (WRITTEN_OUT,),
    ),
    Fault(
        "a state is written where the committed one is",
        "states",
        STATES,
        "save - base, slot + (not row.flipped)",
        "save - base, slot + row.flipped",
        (WRITTEN_OUT,),
    ),
    Fault(
        "a row that was preempted goes on from its old state",
        "states",
        STATES,
        "            self._rows.pop(name, None)\n",
        "",
        (WRITTEN_OUT, "tests/models/test_states.py::test_rows_that_are_preempted_begin_again"),
    ),
    Fault(
        "a convolution sees the token before a node, and not its parent",
        "states",
        STATES,
        "            parent = parents[index]\n",
        "            parent = index - 1\n",
        (WRITTEN_OUT,),
    ),
    Fault(
        "a branch starts from its sibling",
        "states",
        STATES,
        "while (parent := parents[indices[-1]]) >= base:",
        "while (parent := indices[-1] - 1) >= base:",
        (WRITTEN_OUT,),
    ),
    Fault(
        "the delta rule reads a state before it decays, in C++",
        "states",
        KERNEL,
        "        row[v] *= scales[v];\n        sums[v] += weight * row[v];\n",
        "        sums[v] += weight * row[v];\n        row[v] *= scales[v];\n",
        (WRITTEN_OUT,),
    ),
    Fault(
        "a branch goes on from the end of the one before, in C++",
        "states",
        KERNEL,
        "if (path.shared > 0) std::copy_n",
        "if (path.shared < 0) std::copy_n",
        (WRITTEN_OUT,),
    ),
    Fault(
        "keys are not normed",
        "states",
        MIXING,
        'if of["use_qk_l2norm_in_kernel"]:',
        'if of["use_qk_l2norm_in_kernel"] is None:',
        (FORWARD,),
    ),
    Fault(
        "the limits of a time step are ignored",
        "states",
        MIXING,
        '.clamp(*of["dt_limit"])',
        "",
        (FORWARD,),
    ),
    Fault(
        "a module that runs row by row forgets committed tokens",
        "states",
        STATES,
        "if not self._whole and not row.ahead and",
        "if not row.ahead and",
        (ROW_BY_ROW,),
    ),
    Fault(
        "a module that runs row by row keeps inputs of rejected siblings",
        "states",
        STATES,
        "for index in moved))",
        "for index in range(num_fixed, kv_len)))",
        (ROW_BY_ROW,),
    ),
    Fault(
        "results of a branch go to other nodes",
        "states",
        STATES,
        "= result[new]",
        "= result[: len(new)]",
        (ROW_BY_ROW,),
    ),
    Fault(
        "masks are those of the first texts",
        "states",
        PER_ROW,
        "mixer.longest > self._length:",
        "mixer.longest < 0:",
        (ROW_BY_ROW,),
    ),
    Fault(
        "tokens may see later ones",
        "states",
        "emssd/model/probe.py",
        "    if not change <= PROBE_TOLERANCE[target.dtype]:\n",
        "    if change != change:\n",
        ("tests/models/test_per_row.py::test_a_model_whose_tokens_see_later_ones_is_refused",),
    ),
    Fault(
        "texts that the model pads go to its modules unpadded",
        "states",
        PER_ROW,
        "shape[1] != length",
        "shape[1] < length",
        ("tests/models/test_per_row.py::test_a_model_that_pads_long_texts_is_refused_where_they_may_come",),
    ),
)
