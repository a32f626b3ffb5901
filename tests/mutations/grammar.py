"""Faults of grammars: masks of another text, matchers that stay behind a draft, forced tokens of an older text."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

CHOOSING = "emssd/decoding/choosing.py"
MATCHING = "emssd/sampling/matching.py"
TESTS = "tests/sampling/test_grammar.py::"
SAME = TESTS + "test_texts_are_valid_and_those_of_the_run_without_drafts"
ORDER = TESTS + "test_states_in_any_order_are_those_of_a_matcher_that_only_went_forward"

FAULTS = (
    Fault(
        "a node has the mask of its parent",
        "grammar",
        CHOOSING,
        "states.append(None if above is None else above.after(token))",
        "states.append(above)",
        (SAME, TESTS + "test_forced_tokens_are_drafted_and_all_of_them_accepted"),
    ),
    Fault(
        "a node goes on from its older sibling",
        "grammar",
        CHOOSING,
        "        above = states[parent + 1]\n",
        "        above = states[-1]\n",
        (SAME, TESTS + "test_preempted_rows_go_on_with_the_same_text"),
    ),
    Fault(
        "the matcher does not go back from a rejected draft",
        "grammar",
        MATCHING,
        "            self._own.rollback(num_back)\n",
        "",
        (ORDER, SAME),
    ),
    Fault(
        "the mask comes behind temperature and top-k",
        "grammar",
        "emssd/sampling/choice.py",
        "    logits = within_grammars(logits, nodes)\n    chosen",
        "    chosen",
        (SAME, TESTS + "test_forced_tokens_are_drafted_and_all_of_them_accepted"),
    ),
    Fault(
        "forced tokens are those of the text before the step",
        "grammar",
        MATCHING,
        "            return []\n        self._go_to(state)\n",
        "            return []\n",
        (TESTS + "test_forced_tokens_are_drafted_and_all_of_them_accepted", ORDER),
    ),
    Fault(
        "what a grammar forbids is verified",
        "grammar",
        "emssd/drafting/stages.py",
        "            proposed = _allowed(proposed, batch, drafter)\n",
        "",
        (TESTS + "test_what_a_grammar_forbids_is_not_verified",),
    ),
)
