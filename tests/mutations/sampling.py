"""Faults of sampling, of log-probabilities, and of jobs that are resumed."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

CHOOSING = "emssd/decoding/choosing.py"
LOGPROBS = "emssd/decoding/logprobs.py"
PROCESSING = "emssd/sampling/processing.py"
RULES = "emssd/sampling/residual/rules.py"
RESUME = "emssd/cli/resume.py"
LINES = "emssd/cli/lines_file.py"

FAULTS = (
    Fault(
        "noise goes by the row's place in the batch",
        "coupled sampling",
        CHOOSING,
        "noise_key(params.seed, request.prompt_id, request.sample)",
        "noise_key(params.seed, str(row), request.sample)",
        (
            "tests/sampling/test_engine.py::test_a_text_depends_on_seed_and_request_and_on_nothing_else",
            "tests/sampling/test_engine.py::test_preempted_rows_go_on_with_the_same_text",
        ),
    ),
    Fault(
        "all samples of a prompt are drawn alike",
        "coupled sampling",
        CHOOSING,
        "noise_key(params.seed, request.prompt_id, request.sample)",
        "noise_key(params.seed, request.prompt_id)",
        ("tests/sampling/test_samples.py::test_preempted_ones_go_on_with_the_same_text",),
    ),
    Fault(
        "nodes of a tree draw with the noise of their index",
        "coupled sampling",
        CHOOSING,
        "*(len(tokens) + depth for depth in depths(tree))]",
        "*(len(tokens) + depth for depth, _ in enumerate(tree, 1))]",
        ("tests/sampling/test_engine.py::test_drafts_of_the_sampled_text_are_accepted_as_chains_and_as_trees",),
    ),
    Fault(
        "the noise of a position is the same in all rows",
        "coupled sampling",
        "emssd/sampling/noise.py",
        "return _splitmix64(key ^ _splitmix64(position))",
        "return _splitmix64(_splitmix64(position))",
        (
            "tests/sampling/test_noise.py::test_bits_are_those_of_the_hash_in_python",
            "tests/sampling/test_noise.py::test_bits_are_written_down",
        ),
    ),
    Fault(
        "what rounding leaves open is not decided",
        "coupled sampling",
        "emssd/sampling/choice.py",
        "if token < 0]\n",
        "if token < -1]\n",
        (
            "tests/sampling/test_kernel.py::test_totals_that_are_too_near_are_left_to_pytorch",
            "tests/sampling/test_choice.py::test_choices_are_those_written_out_by_hand",
        ),
    ),
    Fault(
        "rows of one temperature are processed by the other options of the first",
        "processors",
        "emssd/sampling/choice.py",
        "None if params.takes_largest else params.processing,",
        "None if params.takes_largest else params.temperature,",
        ("tests/sampling/test_choice.py::test_choices_are_those_written_out_by_hand",),
    ),
    Fault(
        "penalties read siblings",
        "processors",
        CHOOSING,
        "prefixes[node] = [*prefixes[parent + 1], token]",
        "prefixes[node] = [*prefixes[node - 1], token]",
        ("tests/sampling/test_engine.py::test_penalties_see_the_tokens_of_the_draft_on_the_way_to_a_node",),
    ),
    Fault(
        "penalties count the prompt as output",
        "processors",
        PROCESSING,
        "(counts := Counter(prefix[num_prompt:]))",
        "(counts := Counter(prefix))",
        (
            "tests/sampling/test_choice.py::test_choices_are_those_written_out_by_hand",
            "tests/sampling/test_choice.py::test_processed_logits_are_those_written_out_by_hand",
        ),
    ),
    Fault(
        "top-p drops the last token that it allows",
        "processors",
        PROCESSING,
        "scores.masked_fill(scores < least, -math.inf)",
        "scores.masked_fill(scores <= least, -math.inf)",
        (
            "tests/sampling/test_choice.py::test_choices_are_those_written_out_by_hand",
            "tests/sampling/test_choice.py::test_processed_logits_are_those_written_out_by_hand",
        ),
    ),
    Fault(
        "p is of the node before",
        "residual rules",
        RULES,
        "left.append(target[node + 1])",
        "left.append(target[node])",
        ("tests/sampling/test_residual_law.py::test_a_draft_with_the_law_of_the_target_is_accepted_to_its_end",),
    ),
    Fault(
        "a parent's chance stays as it was when its child is rejected",
        "residual rules",
        RULES,
        "return mass / (mass + (1 - alpha)), left",
        "return alpha, left",
        ("tests/sampling/test_residual_law.py::test_the_output_of_any_tree_has_the_law_of_the_target",),
    ),
    Fault(
        "a token that was drawn can be drawn again",
        "residual rules",
        "emssd/sampling/residual/distributions.py",
        "    rest[token] = 0\n",
        "",
        (
            "tests/sampling/test_residual_floats.py::test_without_a_token_the_others_add_up_to_one",
            "tests/sampling/test_residual_drafts.py::test_children_are_drawn_without_replacement",
        ),
    ),
    Fault(
        "the last token is drawn from p, and not from what is left of it",
        "residual rules",
        RULES,
        "choose(left[node + 1], uniform()))\n    return Verdict([]",
        "choose(target[node + 1], uniform()))\n    return Verdict([]",
        ("tests/sampling/test_residual_law.py::test_the_output_of_any_tree_has_the_law_of_the_target",),
    ),
    Fault(
        "every step of a row is verified with the same numbers",
        "residual rules",
        "emssd/decoding/choosing.py",
        'uniforms(nodes[0].key, "verify", len(row.tokens))',
        'uniforms(nodes[0].key, "verify", len(row.request.prompt_ids))',
        ("tests/sampling/test_residual_engine.py::test_tokens_have_the_targets_law",),
    ),
    Fault(
        "a policy trims what residual sampling must verify whole",
        "residual rules",
        "emssd/drafting/stages.py",
        "    return [length if q is None else whole for q",
        "    return [length for q",
        ("tests/sampling/test_residual_engine.py::test_policies_that_look_at_tokens_cannot",),
    ),
    Fault(
        "what is left of a draft keeps the q of other nodes",
        "residual rules",
        "emssd/drafting/draft.py",
        "for place in (0, *(node + 1 for node in nodes)))",
        "for place in (0, *nodes))",
        (
            "tests/core/test_draft_q.py::test_picked_nodes_keep_their_own",
            "tests/core/test_draft_q.py::test_joined_rows_have_that_of_who_drafted_them",
        ),
    ),
    Fault(
        "the logprob of a token is that behind the token itself",
        "logprobs",
        LOGPROBS,
        "places += [start, *(start + 1 + node for node in",
        "places += [start + 1, *(start + 1 + node for node in",
        (
            "tests/sampling/test_logprobs.py::test_a_step_that_is_done_again_gives_them_once",
            "tests/sampling/test_logprobs.py::test_preempted_rows_keep_theirs",
        ),
    ),
    Fault(
        "logprobs are read from the row before",
        "logprobs",
        LOGPROBS,
        "start = draft.indptr[place] + place",
        "start = draft.indptr[place]",
        (
            "tests/sampling/test_logprobs.py::test_preempted_rows_keep_theirs",
            "tests/sampling/test_logprobs.py::test_they_are_the_models_own_whatever_drafts",
        ),
    ),
    Fault(
        "processed logprobs read the token that they are of",
        "logprobs",
        LOGPROBS,
        "[*row.tokens, *new[:count]]",
        "[*row.tokens, *new[: count + 1]]",
        ("tests/sampling/test_logprobs.py::test_they_are_the_models_own_whatever_drafts",),
    ),
    Fault(
        "logprobs of tokens that EOS cut off are kept",
        "logprobs",
        "emssd/sequences/row.py",
        "self.logprobs += tuple(logprobs[: len(tokens)])",
        "self.logprobs += tuple(logprobs)",
        ("tests/sampling/test_logprobs.py::test_tokens_behind_an_end_have_none",),
    ),
    Fault(
        "a prompt counts as done with its first sample",
        "resumed jobs",
        RESUME,
        "if any((prompt.prompt_id, sample) not in output.finished for sample",
        "if all((prompt.prompt_id, sample) not in output.finished for sample",
        (
            "tests/cli/test_samples.py::TestResume::test_goes_on_with_the_samples_that_are_not_there",
            "tests/cli/test_samples.py::TestResume::test_adds_samples_and_takes_none_away",
        ),
    ),
    Fault(
        "samples that are there are made again",
        "resumed jobs",
        "emssd/cli/intake.py",
        "if (prompt.prompt_id, each.sample) not in finished]",
        "]",
        (
            "tests/cli/test_samples.py::TestResume::test_goes_on_with_the_samples_that_are_not_there",
            "tests/cli/test_samples.py::TestResume::test_adds_samples_and_takes_none_away",
        ),
    ),
    Fault(
        "rows that were made with other options are kept",
        "resumed jobs",
        RESUME,
        "if changed := output.changed_options(config_text):",
        'if changed := "":',
        ("tests/cli/test_long_jobs.py::test_what_determines_the_output_may_not_change",),
    ),
    Fault(
        "half a line of a crash is kept",
        "resumed jobs",
        LINES,
        'content.rfind(b"\\n") + 1\n',
        "len(content)\n",
        ("tests/cli/test_lines_file.py::test_what_is_not_kept_stays_until_there_is_a_line",),
    ),
    Fault(
        "two runs write to one folder",
        "resumed jobs",
        "emssd/errors/files.py",
        "fcntl.LOCK_EX | (0",
        "fcntl.LOCK_SH | (0",
        (
            "tests/cli/test_lines_file.py::test_a_file_that_was_removed_before_it_was_locked_is_made_again",
            "tests/cli/test_long_jobs.py::test_two_runs_do_not_write_to_one_folder",
        ),
    ),
)
