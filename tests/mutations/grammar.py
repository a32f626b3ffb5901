"""Faults of grammars: masks of another text, matchers that stay behind a draft, forced tokens of an older text."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

CHOOSING = "emssd/decoding/choosing.py"
MATCHING = "emssd/sampling/matching.py"
TESTS = "tests/sampling/test_grammar.py::"
SAME = TESTS + "test_texts_are_valid_and_those_of_the_run_without_drafts"
LAW = "tests/sampling/test_grammar_law.py::"
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
    Fault(
        "residual sampling knows no grammar",
        "grammar",
        "emssd/sampling/residual/probabilities.py",
        "nodes[0].params, within_grammars(logits, nodes)",
        "nodes[0].params, logits",
        (
            LAW + "test_outputs_have_the_law_of_the_model_among_what_the_grammar_allows",
            TESTS + "test_residual_sampling_gives_valid_texts",
        ),
    ),
    Fault(
        "log-probabilities are masked behind top-k and top-p",
        "grammar",
        "emssd/decoding/logprobs.py",
        "processed(within_grammars(logits[index], own), own[0].params, prefixes, lengths)",
        "within_grammars(processed(logits[index], own[0].params, prefixes, lengths), own)",
        (LAW + "test_the_mask_comes_before_temperature_top_k_and_top_p",),
    ),
    Fault(
        "logits without a grammar's tokens are masked by the grammar of another row",
        "grammar",
        MATCHING,
        "    index = on_device(places, logits.device)\n",
        "    index = on_device([*range(len(places))], logits.device)\n",
        (TESTS + "test_rows_with_and_without_a_grammar_share_a_batch",),
    ),
    Fault(
        "custom_generate forgets the grammar",
        "grammar",
        "emssd/integrations/hf.py",
        "        call = replace(call, sampling=sampling)\n",
        "",
        (LAW + "test_custom_generate_gives_what_generate_gives_with_a_function_of_allowed_tokens",),
    ),
    Fault(
        "forced tokens are drafted whatever the option says",
        "grammar",
        "emssd/decoding/engine.py",
        "            if self.force_tokens:\n",
        "            if True:\n",
        (LAW + "test_forced_tokens_are_not_drafted_if_an_option_says_so",),
    ),
)
