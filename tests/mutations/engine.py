"""Faults of the decode loop: packing, verification, sequences, stopping, scheduling, and what rows share."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

ENGINE = "emssd/decoding/engine.py"
VERIFY = "emssd/decoding/verify.py"
PACKING = "emssd/decoding/packing.py"
SCHEDULER = "emssd/decoding/scheduler.py"
SEQUENCE = "emssd/sequences/row.py"
STOPPING = "emssd/sequences/stopping.py"
STAGES = "emssd/drafting/stages.py"

FAULTS = (
    Fault(
        "the settings that a plugin leaves changed are not looked at in a step",
        "faults",
        "emssd/errors/faults.py",
        "if error is None and self._in_step and _settings() == self._before:",
        "if error is None and self._in_step:",
        (
            "tests/core/test_drafting.py::test_a_drafter_that_fails_is_switched_off_with_a_warning_and_the_output_is_that_of_greedy",
        ),
    ),
    Fault(
        "the KV of a rejected token counts as cached",
        "engine",
        SEQUENCE,
        "self.num_cached = len(self.tokens) + num_accepted",
        "self.num_cached = len(self.tokens) + num_drafted",
        (
            "tests/core/test_engine.py::test_peak_kv_memory_is_exactly_the_pages_that_the_rows_of_a_step_need",
            "tests/core/test_tree_steps.py::test_all_that_is_right_is_accepted_among_decoys",
        ),
    ),
    Fault(
        "the KV of accepted nodes stays where it is if the first of them is the first of all",
        "engine",
        ENGINE,
        "if not nodes or nodes[-1] == len(nodes) - 1 else",
        "if not nodes or nodes[0] == 0 else",
        ("tests/core/test_tree_steps.py::test_long_rows_in_whole_batches",),
    ),
    Fault(
        "KV moves only in steps in which that of all rows does",
        "engine",
        ENGINE,
        "if any(sources) else ()",
        "if all(sources) else ()",
        ("tests/core/test_tree_steps.py::test_rows_with_trees_beside_rows_with_chains_or_nothing",),
    ),
    Fault(
        "a row that was preempted believes in the KV it had",
        "engine",
        ENGINE,
        "            for row in gone:\n                row.num_cached = 0\n",
        "",
        ("tests/core/test_hidden.py::test_a_preempted_row_begins_anew",),
    ),
    Fault(
        "drafters do not hear that a row is gone",
        "engine",
        ENGINE,
        "            self.drafting.release(request_ids)\n",
        "",
        (
            "tests/core/test_engine.py::test_finished_and_abandoned_requests_are_released_once_each",
            "tests/core/test_hidden.py::test_a_preempted_row_begins_anew",
        ),
    ),
    Fault(
        "rows that finish in the step that a plugin fails in are lost",
        "engine",
        ENGINE,
        "            for row in self._handed_over():  # by a step that failed after its tokens\n"
        "                yield Generation.of(row, self.tokenizer)\n",
        "",
        (
            "tests/core/test_interrupted_steps.py::test_rows_that_finish_in_a_step_that_fails_behind_its_tokens_are_not_lost",
        ),
    ),
    Fault(
        "generations come in finish order",
        "engine",
        ENGINE,
        "[done[place] for place in sorted(done)]",
        "[done[place] for place in done]",
        ("tests/core/test_engine.py::test_generations_stream_in_finish_order_and_are_returned_in_prompt_order",),
    ),
    Fault(
        "hidden states of accepted nodes are those of the node before",
        "engine",
        "emssd/decoding/outcome.py",
        "origin + node for node in verified[row].accepted",
        "origin + node - 1 for node in verified[row].accepted",
        ("tests/core/test_hidden.py::test_trees_and_prompts_in_pieces_give_the_states_of_one_plain_pass",),
    ),
    Fault(
        "the target's own token is that of as many nodes as were accepted, also in a tree",
        "verify",
        VERIFY,
        "chosen[path[-1] + 1 if path else 0]",
        "chosen[len(path)]",
        (
            "tests/core/test_verify.py::test_of_all_ways_through_a_tree_the_longest_right_one_is_accepted",
            "tests/core/test_verify.py::test_a_trees_tokens_are_those_of_decoding_step_by_step",
            "tests/core/test_verify.py::test_of_equal_siblings_the_one_with_the_right_child_is_accepted",
        ),
    ),
    Fault(
        "rows are verified by the choices of the row before",
        "verify",
        VERIFY,
        "places = slice(start + row, stop + row + 1)",
        "places = slice(start, stop + 1)",
        (
            "tests/core/test_verify.py::test_accepts_exactly_the_tokens_that_step_by_step_decoding_would_give",
            "tests/core/test_verify.py::test_candidates_are_the_targets_best_tokens_at_every_node",
            "tests/core/test_verify.py::test_of_all_ways_through_a_tree_the_longest_right_one_is_accepted",
        ),
    ),
    Fault(
        "a node below a rejected one is accepted",
        "verify",
        VERIFY,
        "if parent in paths and token == choices[parent + 1]:\n            paths[node] = [*paths[parent], node]",
        "if token == choices[parent + 1]:\n            paths[node] = [*paths.get(parent, []), node]",
        (
            "tests/core/test_verify.py::test_of_all_ways_through_a_tree_the_longest_right_one_is_accepted",
            "tests/core/test_verify.py::test_a_trees_tokens_are_those_of_decoding_step_by_step",
            "tests/core/test_verify.py::test_a_chain_with_parents_is_verified_as_a_chain",
        ),
    ),
    Fault(
        "the last way that is right is taken, not the longest",
        "verify",
        VERIFY,
        "max(paths.values(), key=len)",
        "[*paths.values()][-1]",
        ("tests/core/test_verify.py::test_of_all_ways_through_a_tree_the_longest_right_one_is_accepted",),
    ),
    Fault(
        "the best tokens at the nodes of a row are those of the first row",
        "verify",
        VERIFY,
        "best[places]",
        "best[: stop - start + 1]",
        ("tests/core/test_verify.py::test_candidates_are_the_targets_best_tokens_at_every_node",),
    ),
    Fault(
        "nodes of a tree stand a position too far",
        "packing",
        PACKING,
        "kv_lens[row] - len(tree) - 1 + depth",
        "kv_lens[row] - len(tree) + depth",
        (
            "tests/core/test_trees.py::test_a_packed_tree_stands_by_depth_behind_its_row",
            "tests/core/test_trees.py::test_nodes_packed_level_by_level_are_the_nodes_of_one_step",
            "tests/core/test_trees.py::test_one_ragged_tree_step_by_hand",
        ),
    ),
    Fault(
        "each piece of a prompt is its beginning",
        "packing",
        PACKING,
        "row.tokens[row.num_cached : row.num_cached + num_tokens]",
        "row.tokens[:num_tokens]",
        ("tests/core/test_hidden.py::test_trees_and_prompts_in_pieces_give_the_states_of_one_plain_pass",),
    ),
    Fault(
        "a node does not see its grandparent",
        "trees",
        "emssd/attention/trees.py",
        "bytearray(len(parents)) if parent < 0 else bytearray(rows[parent])\n        row[node] = True",
        "bytearray(len(parents))\n        row[node] = row[parent] = True",
        (
            "tests/core/test_trees.py::test_depth_counts_the_way_and_ancestors_lie_on_it",
            "tests/core/test_trees.py::test_hidden_are_the_nodes_that_are_no_ancestors",
            "tests/core/test_paged.py::test_a_node_sees_its_ancestors_and_itself_and_nobody_else",
        ),
    ),
    Fault(
        "what is left of a tree keeps the parents it had",
        "trees",
        "emssd/drafting/draft.py",
        "[places[parents[node]] for node in nodes]",
        "[parents[node] for node in nodes]",
        (
            "tests/core/test_trees.py::test_picked_nodes_keep_their_ways_and_their_confidence",
            "tests/core/test_trees.py::test_picked_nodes_know_their_parents_by_new_numbers",
            "tests/core/test_trees.py::test_parents_are_counted_among_the_nodes_that_stay",
        ),
    ),
    Fault(
        "a tree has a leaf more than its branches",
        "trees",
        "emssd/drafting/growth.py",
        "if num_leaves == branches:",
        "if num_leaves > branches:",
        ("tests/core/test_growth.py::test_a_branch_that_is_not_among_the_likeliest_of_its_level_has_to_wait",),
    ),
    Fault(
        "EOS is not part of the text",
        "stopping",
        SEQUENCE,
        "return tokens[:count], FinishReason.EOS",
        "return tokens[: count - 1], FinishReason.EOS",
        ("tests/core/test_sequence.py::test_is_cut_after_the_first_eos_and_at_the_limit",),
    ),
    Fault(
        "what was accepted behind a stop string is kept",
        "stopping",
        SEQUENCE,
        "return tokens[:count], FinishReason.STOP",
        "return tokens, FinishReason.STOP",
        (
            "tests/core/test_stopping.py::test_a_row_ends_with_the_token_that_completes_a_stop_string",
            "tests/core/test_stopping.py::test_growing_in_pieces_equals_growing_at_once",
            "tests/core/test_tree_steps.py::test_a_stop_string_inside_of_an_accepted_path_ends_the_row",
        ),
    ),
    Fault(
        "a row ends a token beyond its limit",
        "stopping",
        SEQUENCE,
        "if len(tokens) >= num_remaining else None",
        "if len(tokens) > num_remaining else None",
        ("tests/core/test_sequence.py::test_is_cut_after_the_first_eos_and_at_the_limit",),
    ),
    Fault(
        "a long stop string beside a short one is not found across tokens",
        "stopping",
        STOPPING,
        "max(map(len, self._encoded)) - 1",
        "min(map(len, self._encoded)) - 1",
        ("tests/core/test_stopping.py::test_sentencepiece_tokens",),
    ),
    Fault(
        "a stop string that begins in the prompt counts",
        "stopping",
        STOPPING,
        "and index > start:",
        "and index > 0:",
        (
            "tests/core/test_stopping.py::test_a_row_ends_with_the_token_that_completes_a_stop_string",
            "tests/core/test_stopping.py::test_a_token_behind_a_stop_string_completes_nothing",
        ),
    ),
    Fault(
        "a stop string is found a token late",
        "stopping",
        SEQUENCE,
        "completed_by_last(text, len(request.prompt_ids))",
        "completed_by_last(text[:-1], len(request.prompt_ids))",
        ("tests/core/test_stopping.py::test_a_row_ends_with_the_token_that_completes_a_stop_string",),
    ),
    Fault(
        "the earliest row is preempted",
        "scheduler",
        SCHEDULER,
        "preempted.append(kept.pop())",
        "preempted.append(kept.pop(0))",
        (
            "tests/core/test_scheduler.py::test_every_schedule_of_any_history_is_as_documented",
            "tests/core/test_scheduler.py::test_preempted_rows_come_back_first_and_in_order",
        ),
    ),
    Fault(
        "a preempted row queues behind those that never ran",
        "scheduler",
        SCHEDULER,
        "self._waiting.extendleft(preempted)",
        "self._waiting.extend(preempted)",
        (
            "tests/core/test_scheduler.py::test_every_schedule_of_any_history_is_as_documented",
            "tests/core/test_scheduler.py::test_preempted_rows_come_back_first_and_in_order",
        ),
    ),
    Fault(
        "more rows run than the batch has",
        "scheduler",
        SCHEDULER,
        "islice(self._waiting, self.batch_size - len(running))",
        "islice(self._waiting, self.batch_size)",
        ("tests/core/test_scheduler.py::test_preempted_rows_come_back_first_and_in_order",),
    ),
    Fault(
        "a row drafts the token that only the target may give",
        "scheduler",
        SCHEDULER,
        "[row.max_length - len(row.tokens) - 1 for row in rows]",
        "[row.max_length - len(row.tokens) for row in rows]",
        ("tests/core/test_scheduler.py::test_limits_leave_room_for_the_targets_own_token",),
    ),
    Fault(
        "drafts are limited by the rows' lengths without their drafts",
        "scheduler",
        SCHEDULER,
        "{row.request_id: len(row.tokens) + limit for",
        "{row.request_id: len(row.tokens) for",
        ("tests/core/test_scheduler.py::test_rows_draft_less_where_the_cache_is_nearly_full",),
    ),
    Fault(
        "a drafter is asked for rows that one before it has drafted for",
        "cascade",
        STAGES,
        "still = [0 if length else limit for",
        "still = [limit for",
        (
            "plugins/cascade/tests/test_cascade.py::test_each_row_is_served_by_the_first_drafter_that_has_something",
            "plugins/cascade/tests/test_cascade.py::test_a_row_whose_draft_is_trimmed_away_is_offered_to_the_next_drafter",
            "plugins/cascade/tests/test_cascade.py::test_who_served_a_row_is_forgotten_with_the_step",
            "plugins/cascade/tests/test_cascade.py::test_the_policy_decides_before_and_behind_each_stage_and_knows_what_earlier_ones_drafted",
        ),
    ),
    Fault(
        "a drafter observes what others drafted as if it were its own",
        "cascade",
        STAGES,
        "tuple(nodes if length else () for nodes, length in",
        "tuple(nodes for nodes, length in",
        (
            "plugins/cascade/tests/test_cascade.py::test_each_drafter_hears_of_its_own_rows_and_that_nothing_was_drafted_for_others",
        ),
    ),
    Fault(
        "the KV of a newest token that fills a page is published",
        "prefix sharing",
        "emssd/decoding/prefixes.py",
        "row.tokens[: row.num_cached])",
        "row.tokens)",
        ("tests/backends/test_prefix_caching.py::test_a_page_is_not_shared_before_its_last_token_has_kv",),
    ),
    Fault(
        "rows that begin alike do not wait for each other",
        "prefix sharing",
        "emssd/decoding/prefixes.py",
        "                    waiting.add(row.request_id)\n",
        "                    pass\n",
        (
            "tests/backends/test_prefix_caching.py::test_rows_that_begin_alike_wait_for_the_first_of_them_and_others_do_not",
        ),
    ),
)
