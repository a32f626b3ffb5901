"""Faults of drafters without weights, of drafters that run a model, and of budget policies."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

NGRAMS = "emssd/drafting/ngrams.py"
ANPD = "plugins/anpd/tests/test_anpd.py::"
LOOKUP = "emssd/drafting/lookup.py"
SUFFIX = "plugins/suffix/emssd_suffix/"
REST = "plugins/rest/emssd_rest/search.py"
LOOKAHEAD = "plugins/lookahead/emssd_lookahead/"
RECYCLING = "plugins/token_recycling/emssd_token_recycling/drafter.py"
UNION = "plugins/union/emssd_union/"
DRAFT_MODEL = "plugins/draft_model/emssd_draft_model/"
MODELS = "emssd/drafters/models.py"
ADAPTIVE = "plugins/adaptive/emssd_adaptive/"

FAULTS = (
    Fault(
        "an n-gram's first habit wins a tie",
        "anpd",
        NGRAMS,
        "for token in reversed(found)}",
        "for token in found}",
        ("plugins/anpd/tests/test_anpd.py::test_it_drafts_what_a_search_of_the_whole_text_finds",),
    ),
    Fault(
        "the counts of a row outlive it",
        "anpd",
        NGRAMS,
        "            self._texts.pop(request_id, None)\n",
        "            pass\n",
        ("plugins/anpd/tests/test_anpd.py::test_a_row_that_comes_again_begins_anew",),
    ),
    Fault(
        "a token is counted twice when a text grows",
        "anpd",
        NGRAMS,
        "known if request is row.request else start)",
        "max(start, known - 1) if request is row.request else start)",
        ("plugins/anpd/tests/test_anpd.py::test_it_drafts_what_a_search_of_the_whole_text_finds",),
    ),
    Fault(
        "bigrams are filed under the token that was drafted before",
        "ngrammys",
        "plugins/ngrammys/emssd_ngrammys/drafter.py",
        "tokens = [self._newest[row.request_id], *ids[start:stop]]",
        "tokens = [*ids[start:stop], self._newest[row.request_id]]",
        ("plugins/ngrammys/tests/test_ngrammys.py::test_bigrams_and_ngrams_share_the_probability",),
    ),
    Fault(
        "the index of n-grams forgets the last accepted token",
        "llma, pld",
        LOOKUP,
        "end - self._num_behind + 1)",
        "end - self._num_behind)",
        (
            "tests/core/test_lookup.py::test_each_n_gram_is_read_once_however_the_text_grows",
            "plugins/llma/tests/test_llma.py::test_the_growing_index_gives_what_a_search_from_scratch_gives",
        ),
    ),
    Fault(
        "what stands at a match is copied with the token before it",
        "llma, pld",
        LOOKUP,
        "return tokens[place : min(",
        "return tokens[place - 1 : min(",
        ("plugins/llma/tests/test_llma.py::test_what_each_option_does",),
    ),
    Fault(
        "the index of a row outlives it",
        "llma, pld",
        LOOKUP,
        "            self._indexes.pop(request_id, None)\n",
        "            pass\n",
        (
            "plugins/llma/tests/test_llma.py::test_a_released_request_is_forgotten_and_its_name_can_be_used_again",
            "plugins/llma/tests/test_llma.py::test_after_a_run_no_index_is_left",
        ),
    ),
    Fault(
        "a match that is too near the end to fill a copy counts",
        "llma",
        "plugins/llma/emssd_llma/drafter.py",
        "config.copy_length if config.require_full_copy else 1",
        "1",
        (
            "plugins/llma/tests/test_llma.py::test_what_each_option_does",
            "plugins/llma/tests/test_llma.py::test_the_defaults_are_the_papers_setting_prompt_only_last_match_and_a_full_copy",
        ),
    ),
    Fault(
        "the shortest n-gram is looked up first",
        "pld",
        "plugins/pld/emssd_pld/drafter.py",
        "range(config.max_ngram_size, config.min_ngram_size - 1, -1)",
        "range(config.min_ngram_size, config.max_ngram_size + 1)",
        (
            "plugins/pld/tests/test_pld.py::test_the_defaults_are_the_published_ones_the_first_longest_match_with_ten_tokens_behind_it",
        ),
    ),
    Fault(
        "a state that is split off begins to count anew",
        "suffix",
        SUFFIX + "automaton.py",
        "self.counts.append(self.counts[known])",
        "self.counts.append(0)",
        (
            "plugins/suffix/tests/test_automaton.py::test_it_holds_the_strings_of_the_text_with_their_counts_and_what_follows",
        ),
    ),
    Fault(
        "the automaton misses the first token of each step",
        "suffix",
        SUFFIX + "drafter.py",
        "own.extend(row.tokens[own.num_tokens :])",
        "own.extend(row.tokens[own.num_tokens + (own.num_tokens > 0) :])",
        (
            "plugins/suffix/tests/test_suffix.py::test_it_drafts_what_counting_by_hand_drafts_while_rows_grow_end_and_come_again",
        ),
    ),
    Fault(
        "the end of the text counts among what follows a match",
        "suffix",
        SUFFIX + "drafter.py",
        "counts[following] / (counts[state] - (state in match.ends))",
        "counts[following] / counts[state]",
        (
            "plugins/suffix/tests/test_suffix.py::test_it_drafts_what_counting_by_hand_drafts_while_rows_grow_end_and_come_again",
            "plugins/suffix/tests/test_suffix.py::test_a_draft_ends_where_its_probability_by_what_followed_before_falls_below_the_least",
        ),
    ),
    Fault(
        "one output of the cache goes on with the next",
        "suffix",
        SUFFIX + "sources.py",
        "text = [*output[1 - self._max_tokens :], SEPARATOR]",
        "text = [*output[1 - self._max_tokens :]]",
        (
            "plugins/suffix/tests/test_branches.py::test_the_end_of_a_remembered_output_is_no_token_of_a_tree",
            "plugins/suffix/tests/test_automaton.py::test_the_cache_is_bounded_and_forgets_the_older_half",
        ),
    ),
    Fault(
        "drafted texts begin anew, and join no word before them",
        "translated",
        DRAFT_MODEL + "translated.py",
        "return whole[len(end) :] if whole[: len(end)] == end else self._target.ids_of(text) or []",
        "return whole",
        ("plugins/draft_model/tests/test_translated.py::test_it_is_accepted_as_with_the_targets_own_tokenizer",),
    ),
    Fault(
        "shared tokens are drawn with the noise of another place",
        "translated",
        DRAFT_MODEL + "translated.py",
        "row if self._shared is None else self._rows[row.request_id]",
        "row",
        ("plugins/draft_model/tests/test_translated.py::test_it_is_accepted_as_with_the_targets_own_tokenizer",),
    ),
    Fault(
        "KV of a text that was encoded otherwise is kept",
        "translated",
        DRAFT_MODEL + "translated.py",
        "enumerate(zip(fed, text, strict=False)) if a != b), len(fed))",
        "enumerate(zip(fed, text, strict=False)) if False), len(fed))",
        ("plugins/draft_model/tests/test_translated.py::test_any_vocabulary_leaves_tokens_as_they_are",),
    ),
    Fault(
        "a group drafts from outputs of other prompts",
        "anpd",
        NGRAMS,
        "prompt = row.request.prompt_ids\n",
        "prompt = ()\n",
        (
            ANPD
            + "test_a_group_drafts_from_its_samples_while_they_grow_and_from_earlier_epochs_and_other_prompts_do_not",
        ),
    ),
    Fault(
        "the latest prompt is forgotten first",
        "anpd",
        NGRAMS,
        "self._groups.pop(next(iter(self._groups)))",
        "self._groups.popitem()[1]",
        (ANPD + "test_the_prompts_that_were_decoded_longest_ago_are_forgotten_first",),
    ),
    Fault(
        "a preempted row is remembered twice",
        "anpd",
        NGRAMS,
        "known if request is row.request else start)",
        "start)",
        (ANPD + "test_a_preempted_row_is_remembered_once_and_another_of_its_name_anew",),
    ),
    Fault(
        "the matched token is drafted again",
        "rest",
        REST,
        "return self._sample(places, max_matches) + match",
        "return self._sample(places, max_matches) + match - 1",
        (
            "plugins/rest/tests/test_store.py::test_matches_and_chains_are_those_of_their_definitions",
            "plugins/rest/tests/test_rest.py::test_each_row_gets_its_own_chain_within_its_budget",
        ),
    ),
    Fault(
        "a chain goes on into the next document",
        "rest",
        REST,
        "            if token == END:\n                break\n            rows",
        "            rows",
        (
            "plugins/rest/tests/test_store.py::test_a_draft_never_runs_across_two_documents",
            "plugins/rest/tests/test_store.py::test_matches_and_chains_are_those_of_their_definitions",
        ),
    ),
    Fault(
        "the last drafted token counts as cached, which was never computed",
        "draft_model",
        DRAFT_MODEL + "drafter.py",
        "min(len(accepted), length - 1)",
        "len(accepted)",
        (
            "plugins/draft_model/tests/test_draft_model.py::test_after_any_acceptance_it_drafts_what_a_fresh_drafter_drafts",
            "plugins/draft_model/tests/test_draft_model.py::test_a_draft_model_that_is_the_target_has_everything_accepted",
        ),
    ),
    Fault(
        "drafted tokens stand a position too early",
        "draft_model",
        DRAFT_MODEL + "drafter.py",
        "kv_lens = [len(row.tokens) + depth for row in rows]",
        "kv_lens = [len(row.tokens) + depth - 1 for row in rows]",
        ("plugins/draft_model/tests/test_draft_model.py::test_it_drafts_the_draft_models_own_greedy_continuation",),
    ),
    Fault(
        "the draft model guesses with the noise of the token before",
        "draft_model",
        "emssd/sampling/draws.py",
        "Node(node.params, node.key, node.position + depth, prefix, node.num_prompt, state)",
        "Node(node.params, node.key, node.position + depth - 1, prefix, node.num_prompt, state)",
        (
            "tests/sampling/test_draws.py::test_a_node_behind_others_has_their_tokens_only_where_they_are_read",
            "plugins/draft_model/tests/test_sampled_drafts.py::test_all_of_its_chains_are_accepted",
        ),
    ),
    Fault(
        "the KV of a rejected sibling is kept for the accepted node",
        "draft_model",
        MODELS,
        "moved = kept != list(range(len(kept)))",
        "moved = False",
        (
            "plugins/draft_model/tests/test_trees.py::test_a_draft_model_that_is_the_target_has_a_way_to_the_last_level_accepted_in_every_step",
        ),
    ),
    Fault(
        "a level is computed with the parents of all nodes, also those that are not cached",
        "draft_model",
        "emssd/drafting/levels.py",
        "self.cached_parents.append(self.places[self.parents[node]])",
        "self.cached_parents.append(self.parents[node])",
        ("plugins/draft_model/tests/test_trees.py::test_dynamic_is_the_tree_of_eagle_2",),
    ),
    Fault(
        "a node is as likely as its own choice, whatever its way",
        "draft_model",
        "emssd/drafting/levels.py",
        "tuple([before[parent] + log_prob for",
        "tuple([log_prob for",
        ("plugins/draft_model/tests/test_trees.py::test_dynamic_is_the_tree_of_eagle_2",),
    ),
    Fault(
        "the window reads what was said behind the guesses",
        "lookahead",
        LOOKAHEAD + "drafter.py",
        "*target_ids[1 + kept.num_guesses :]]",
        "*target_ids[kept.num_guesses :]]",
        (
            "plugins/lookahead/tests/test_lookahead.py::test_an_ngram_of_the_window_ends_with_what_the_target_says_behind_it",
        ),
    ),
    Fault(
        "the window moves on without the newest token",
        "lookahead",
        LOOKAHEAD + "window.py",
        "levels = [[newest, *self._levels[0][1:]], *",
        "levels = [self._levels[0], *",
        (
            "plugins/lookahead/tests/test_lookahead.py::test_the_window_is_a_chain_with_columns_below_and_moves_by_a_place",
        ),
    ),
    Fault(
        "the target's candidates are filed under the token that it chose",
        "token_recycling",
        RECYCLING,
        "tokens = [self._origins[row.request_id], *ids[start:stop]]",
        "tokens = [row.tokens[-1], *ids[start:stop]]",
        (
            "plugins/token_recycling/tests/test_token_recycling.py::test_the_table_holds_what_the_target_considers_behind_every_token_of_a_step",
        ),
    ),
    Fault(
        "a child is as likely as if its parent were sure",
        "token_recycling",
        RECYCLING,
        "(score * shares[0], order, node, token, 0, level + 1)",
        "(-shares[0], order, node, token, 0, level + 1)",
        (
            "plugins/token_recycling/tests/test_token_recycling.py::test_the_tree_has_the_likeliest_ways_over_the_table_the_likeliest_first",
        ),
    ),
    Fault(
        "a drafter hears the choice behind the node before its own",
        "union",
        UNION + "drafter.py",
        "*(chosen[place + 1] for place in found)]",
        "*(chosen[place] for place in found)]",
        ("plugins/union/tests/test_union.py::test_each_drafter_hears_what_verifying_its_own_draft_would_have_told",),
    ),
    Fault(
        "nodes that were cut away count as accepted",
        "union",
        UNION + "merging.py",
        "if parent in paths and place in accepted:",
        "if parent in paths:",
        ("plugins/union/tests/test_union.py::test_each_drafter_hears_what_verifying_its_own_draft_would_have_told",),
    ),
    Fault(
        "the KV of a mask is kept for the token that came there",
        "pard",
        "plugins/pard/emssd_pard/drafter.py",
        "[len(row.tokens) for row in rows])",
        "[len(row.tokens) + (row.tree.depth > 1) for row in rows])",
        ("plugins/pard/tests/test_pard.py::test_after_any_acceptance_it_drafts_what_one_pass_over_everything_gives",),
    ),
    Fault(
        "a row computes one mask too few",
        "pard",
        "plugins/pard/emssd_pard/drafter.py",
        "[self._mask] * (row.tree.depth - 1) for row in rows)",
        "[self._mask] * (row.tree.depth - 2) + [0] * (row.tree.depth > 1) for row in rows)",
        ("plugins/pard/tests/test_pard.py::test_after_any_acceptance_it_drafts_what_one_pass_over_everything_gives",),
    ),
    Fault(
        "4 bits are scaled by the group behind",
        "self",
        "emssd/native/cpp/linear.cpp",
        "scales[output * groups + group] : 0",
        "scales[output * groups + (group + 1) % groups] : 0",
        ("plugins/self_draft/tests/test_self.py::test_the_kernel_multiplies_what_4_bits_stand_for",),
    ),
    Fault(
        "bytes of inputs are cut, not rounded",
        "self",
        "emssd/native/cpp/linear.cpp",
        "| Bits(0x3f000000u)",
        "| Bits(0u)",
        ("plugins/self_draft/tests/test_self.py::test_inputs_are_rounded_to_the_nearest_byte",),
    ),
    Fault(
        "the rounded copy of a model that has changed stays",
        "self",
        "emssd/model/rounded.py",
        "if self._made_of is None or self._made_of[0] != state[0] or self._made_of[1] is not state[1]:",
        "if self._made_of is None:",
        ("plugins/self_draft/tests/test_self.py::test_a_model_that_changes_is_rounded_again",),
    ),
    Fault(
        "a draft is packed as if one token less were committed, over its KV",
        "self",
        "emssd/drafters/shared.py",
        "return row.num_cached",
        "return max(row.num_cached - 2, 0)",
        ("plugins/self_draft/tests/test_self.py::test_a_draft_computes_no_token_that_is_committed",),
    ),
    Fault(
        "an adapter reads the layer before its own",
        "kangaroo",
        "plugins/kangaroo/emssd_kangaroo/runner.py",
        "shallow.take_hidden((num_layers,))",
        "shallow.take_hidden((num_layers - 1,))\n        self._num_layers = num_layers - 1",
        ("plugins/kangaroo/tests/test_kangaroo.py::test_an_adapter_that_is_always_right_is_always_accepted",),
    ),
    Fault(
        "the first layers run with the KV cache of the whole model's last",
        "early_exit",
        "emssd/drafters/models.py",
        "layers=spec.layers[:num_layers], trees",
        "layers=spec.layers[-num_layers:], trees",
        ("plugins/early_exit/tests/test_early_exit.py::test_it_drafts_what_the_first_layers_say_without_a_cache",),
    ),
    Fault(
        "a level of a chain in C++ stands at the position of the level before",
        "draft_model",
        "emssd/native/cpp/program.h",
        "next_positions.push_back(positions[row] + level + 1)",
        "next_positions.push_back(positions[row] + level)",
        ("tests/models/test_chains.py::test_a_draft_model",),
    ),
    Fault(
        "a chain goes on behind a token that is not sure enough",
        "early_exit",
        "emssd/drafting/shapes.py",
        "if node < 0 or tree.log_probs[node] >= self.least]",
        "]",
        (
            "plugins/early_exit/tests/test_early_exit.py::test_a_chain_ends_behind_a_token_that_is_not_sure_enough",
            "plugins/kangaroo/tests/test_kangaroo.py::test_a_chain_ends_behind_a_token_that_is_not_sure_enough",
        ),
    ),
    Fault(
        "the wrong token stands behind one more that is right",
        "replay",
        "plugins/replay/emssd_replay/drafter.py",
        "upcoming[right] = (upcoming[right] + self._vocab_size // 2) % self._vocab_size",
        "upcoming[-1] = (upcoming[-1] + self._vocab_size // 2) % self._vocab_size",
        ("plugins/replay/tests/test_replay.py::test_what_is_accepted_is_what_the_trace_says",),
    ),
    Fault(
        "tokens behind the first rejected one count as tried",
        "adaptive",
        ADAPTIVE + "acceptance.py",
        "tried = min(num_accepted + 1, num_drafted)",
        "tried = num_drafted",
        ("plugins/adaptive/tests/test_adaptive.py::test_acceptance_follows_a_row_that_changes",),
    ),
    Fault(
        "a node is taken that costs more than it yields",
        "adaptive",
        ADAPTIVE + "choice.py",
        "if mean <= 0 or mean * size * seconds <= gain * more:",
        "if mean <= 0:",
        (
            "plugins/adaptive/tests/test_adaptive.py::test_what_is_drafted_and_what_is_verified_has_the_best_rate_of_all_there_is",
        ),
    ),
    Fault(
        "drafts of earlier drafters are not counted in a step's tokens",
        "budget",
        "emssd/drafting/stages.py",
        "            num_other += proposed.indptr[-1]\n",
        "",
        (
            "plugins/cascade/tests/test_cascade.py::test_the_policy_decides_before_and_behind_each_stage_and_knows_what_earlier_ones_drafted",
        ),
    ),
)
