"""Faults of KV caches and attention: pages, backends, their kernels, and compiled programs."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

PAGES = "emssd/attention/pages.py"
PAGED = "emssd/attention/paged.py"
TABLES = "emssd/attention/tables.py"
PLANNED = "emssd/attention/planned.py"
FUSED = "plugins/ragged/emssd_ragged/fused.py"
GROUPED = "plugins/ragged/emssd_ragged/grouped.py"
PADDED = "plugins/padded/emssd_padded/backend.py"
FLASHINFER = "plugins/flashinfer/emssd_flashinfer/kernels.py"
NATIVE = "emssd/native/cpp/*.*"

FAULTS = (
    Fault(
        "a page is freed while another sequence holds it",
        "page tables",
        PAGES,
        "        self._holders[page] -= 1\n        if not self._holders[page]:",
        "        self._holders[page] -= 1\n        if self._holders[page] < 2:",
        ("tests/core/test_prefixes.py::TestSharedPages::runTest",),
    ),
    Fault(
        "a page that two sequences share is written to without a copy",
        "page tables",
        PAGES,
        "if self._holders[page] > 1:",
        "if self._holders[page] > 2:",
        (
            "tests/core/test_prefixes.py::test_a_row_that_is_cut_back_into_a_shared_page_gets_a_copy_before_it_writes",
            "tests/backends/test_prefix_caching.py::test_who_is_cut_back_into_a_shared_page_writes_into_a_copy",
        ),
    ),
    Fault(
        "a page that is written to stays known by its old text",
        "page tables",
        PAGES,
        "            else:\n                self._known.remove(page)\n        whole",
        "        whole",
        ("tests/core/test_prefixes.py::test_what_a_row_alone_knows_is_unknown_once_it_writes_there",),
    ),
    Fault(
        "a sequence adopts the KV of its last token too",
        "page tables",
        PAGES,
        "self._known.find(tokens, (len(tokens) - 1) // self.page_size)",
        "self._known.find(tokens, len(tokens) // self.page_size)",
        (
            "tests/core/test_prefixes.py::test_an_adopted_page_is_not_evicted_and_the_last_token_is_not_adopted",
            "tests/backends/test_prefix_caching.py::test_the_last_token_of_a_prompt_is_always_computed",
        ),
    ),
    Fault(
        "a page is kept that holds no token",
        "page tables",
        PAGES,
        "while pages and (len(pages) - 1) * self.page_size >= num_tokens:",
        "while pages and (len(pages) - 1) * self.page_size > num_tokens:",
        (
            "tests/core/test_pages.py::TestPageTable::runTest",
            "tests/backends/test_ragged.py::test_held_memory_is_the_whole_pages_of_the_tokens_to_the_byte",
        ),
    ),
    Fault(
        "pages of a step that failed are counted beside those of the next",
        "page tables",
        PAGES,
        "        self.truncate_all(zip(packed.request_ids, before, strict=True))\n",
        "",
        ("tests/core/test_paged.py::test_what_a_failed_step_took_is_given_back_before_the_next_takes_its_own",),
    ),
    Fault(
        "a page that belongs to another text by now is still found",
        "prefix sharing",
        "emssd/attention/prefixes.py",
        "            del self._found[key]\n",
        "            pass\n",
        (
            "tests/core/test_prefixes.py::test_the_end_of_a_text_is_evicted_before_its_head",
            "tests/core/test_prefixes.py::test_what_a_row_alone_knows_is_unknown_once_it_writes_there",
        ),
    ),
    Fault(
        "the copy of a page has no values",
        "paged kernels",
        PAGED,
        "        for source, target in self._table.copies:\n"
        "            for pages in (*self._pool.keys, *self._pool.values):",
        "        for source, target in self._table.copies:\n            for pages in self._pool.keys:",
        ("tests/backends/test_prefix_caching.py::test_who_is_cut_back_into_a_shared_page_writes_into_a_copy",),
    ),
    Fault(
        "a pool that grows forgets what it held",
        "paged kernels",
        "emssd/attention/pool.py",
        "                    pool[layer][: len(old)] = old\n",
        "",
        ("tests/backends/test_ragged.py::test_pool_grows_with_the_sequences_and_keeps_what_is_in_it",),
    ),
    Fault(
        "tree nodes are stored by depth, siblings in one slot",
        "paged kernels",
        TABLES,
        "if packed.trees is None else runs(kv_lens - q_lens, q_lens)",
        "",
        ("tests/backends/test_flashinfer.py::test_each_path_of_a_tree_attends_as_if_it_were_a_sequence_alone",),
    ),
    Fault(
        "the last page of a row is told to be empty where it is full",
        "paged kernels",
        TABLES,
        "(kv_lens - 1) % size + 1,",
        "kv_lens % size,",
        ("tests/core/test_paged.py::test_metadata_reads_and_writes_the_slots_of_every_token",),
    ),
    Fault(
        "siblings see each other in a mask",
        "paged kernels",
        TABLES,
        "mask[-len(tree) :, -len(tree) :] = ancestors(tree)",
        "mask[-len(tree) :, -len(tree) :] |= ancestors(tree)",
        ("tests/core/test_tree_steps.py::test_all_that_is_right_is_accepted_among_decoys",),
    ),
    Fault(
        "a window in a tree mask is a token longer",
        "paged kernels",
        TABLES,
        "mask &= positions > positions[:, None] - sliding_window",
        "mask &= positions >= positions[:, None] - sliding_window",
        (
            "tests/backends/test_flashinfer.py::test_each_path_of_a_tree_attends_as_if_it_were_a_sequence_alone",
            "tests/core/test_paged.py::test_a_node_sees_its_ancestors_and_itself_and_nobody_else",
        ),
    ),
    Fault(
        "padding tokens of a recorded step write into the first page",
        "flashinfer",
        "emssd/attention/recorded.py",
        "_write(arrays.slots, pages.slots, scrap_slots)",
        "_write(arrays.slots, pages.slots, 0)",
        (
            "tests/backends/test_flashinfer_graphs.py::TestStaticInputs::test_each_step_leaves_nothing_of_the_one_before",
        ),
    ),
    Fault(
        "a recorded step leaves what an earlier one computed in its padding",
        "flashinfer",
        PLANNED,
        "                out[packed.num_tokens : size].zero_()\n",
        "                pass\n",
        (
            "tests/backends/test_flashinfer_graphs.py::test_padding_gets_nothing_of_a_larger_step_before_that_was_not_finite",
        ),
    ),
    Fault(
        "a window is a token longer",
        "flashinfer",
        FLASHINFER,
        "-1 if window is None else window - 1",
        "-1 if window is None else window",
        ("tests/backends/test_flashinfer_wrapper.py::test_it_equals_the_dense_reference_after_any_history",),
    ),
    Fault(
        "a mask is given, and the step is planned as causal all the same",
        "flashinfer",
        FLASHINFER,
        "self._rules(causal=mask is None)",
        "self._rules(causal=True)",
        ("tests/backends/test_flashinfer_wrapper.py::test_a_tree_attends_as_it_does_with_the_reference_kernels",),
    ),
    Fault(
        "a window reaches a token further back",
        "ragged, in PyTorch",
        GROUPED,
        "mask &= keys > queries - window",
        "mask &= keys >= queries - window",
        ("tests/backends/test_tree_windows.py::test_windows_shorter_than_a_tree_is_deep",),
    ),
    Fault(
        "siblings see each other",
        "ragged, in PyTorch",
        GROUPED,
        "                mask &= ~self.hidden\n",
        "                pass\n",
        ("tests/core/test_tree_steps.py::test_all_that_is_right_is_accepted_among_decoys",),
    ),
    Fault(
        "the result of a short row is that of its padding",
        "ragged, in PyTorch",
        GROUPED,
        "range(place * longest, place * longest + stop - start)",
        "range((place + 1) * longest - stop + start, (place + 1) * longest)",
        ("tests/core/test_tree_steps.py::test_rows_that_may_generate_one_two_or_three_tokens",),
    ),
    Fault(
        "slots of rejected tokens are attended to",
        "padded",
        PADDED,
        "            self._positions[self._index(rows), self._index(slots)] = _HOLE\n",
        "            pass\n",
        ("tests/backends/test_conformance.py::test_backend_equals_dense_reference_after_any_history",),
    ),
    Fault(
        "a row that moves up in the slab leaves its positions behind",
        "padded",
        PADDED,
        "            for slab in (*self._keys, *self._values, self._positions):\n                slab[: len(stay)]",
        "            for slab in (*self._keys, *self._values):\n                slab[: len(stay)]",
        ("tests/backends/test_padded.py::test_a_row_that_moves_up_takes_its_positions_along",),
    ),
    Fault(
        "moved KV keeps the position of the sibling that was there",
        "padded",
        PADDED,
        "            for slab in (*self._keys, *self._values, self._positions):\n                slab[row, target]",
        "            for slab in (*self._keys, *self._values):\n                slab[row, target]",
        (
            "tests/backends/test_tree_moves.py::test_a_slab_holds_the_accepted_tokens_at_their_positions_and_pads_as_for_chains",
        ),
    ),
    Fault(
        "logits of padded inputs are taken from another row",
        "padded",
        PADDED,
        "wanted // longest * len(keep) + column_index",
        "wanted // len(keep) * len(keep) + column_index",
        ("tests/core/test_tree_steps.py::test_rows_that_may_generate_one_two_or_three_tokens",),
    ),
    Fault(
        "moved values are taken for keys",
        "ragged, fused",
        FUSED,
        "any(pages is values for values in self._values)",
        "False",
        (
            "tests/backends/test_fused_trees.py::test_tokens_move_as_in_a_plain_copy",
            "tests/backends/test_fused_trees.py::test_an_accepted_way_goes_on_as_a_chain",
        ),
    ),
    Fault(
        "a layer attends in the window of the first",
        "ragged, fused",
        FUSED,
        "[layer.sliding_window or 0 for layer in spec.layers]",
        "[spec.layers[0].sliding_window or 0 for _ in spec.layers]",
        ("tests/backends/test_tree_windows.py::test_windows_shorter_than_a_tree_is_deep",),
    ),
    Fault(
        "nodes of a tree are told to be children of its first",
        "ragged, fused",
        FUSED,
        "[parent for tree in packed.trees for parent in tree]",
        "[min(parent, 0) for tree in packed.trees for parent in tree]",
        (
            "tests/backends/test_fused_tree_steps.py::test_random_trees_give_the_tokens_of_greedy_decoding",
            "tests/backends/test_fused_trees.py::test_beside_prompts_and_chains_on_two_threads_a_node_has_its_bits",
        ),
    ),
    Fault(
        "a window is a token longer, in C++",
        "C++ kernels",
        NATIVE,
        "std::min(end, position - window + 1)",
        "std::min(end, position - window)",
        ("tests/backends/test_fused.py::test_a_window_ends_at_its_token_in_contexts_of_several_blocks",),
    ),
    Fault(
        "a node sees the slots before it, and not its ancestors, in C++",
        "C++ kernels",
        NATIVE,
        "tail[tree.seen(slot, at) - tail_begin]",
        "tail[at - tail_begin]",
        ("tests/backends/test_fused_trees.py::test_trees_in_float64_are_those_of_the_dense_reference",),
    ),
    Fault(
        "weights of earlier blocks of KV keep their old maximum",
        "C++ kernels",
        NATIVE,
        "denominator[i] = denominator[i] * correction + total(sum);",
        "denominator[i] = denominator[i] + total(sum);",
        ("tests/attack/test_attack.py::test_texts_longer_than_a_block_of_the_kernels",),
    ),
    Fault(
        "the kernels' noise does not depend on the position",
        "C++ kernels",
        NATIVE,
        "splitmix64(static_cast<uint64_t>(key) ^ splitmix64(static_cast<uint64_t>(position)))",
        "splitmix64(static_cast<uint64_t>(key) ^ splitmix64(static_cast<uint64_t>(position & 0)))",
        ("tests/sampling/test_kernel.py::test_the_random_bits_are_those_of_the_hash",),
    ),
    Fault(
        "the last of equally large logits is the greedy token",
        "C++ kernels",
        NATIVE,
        "for (place = 0; place + 1 < size && static_cast<Sum>(from[place]) != largest_entry;) ++place;",
        "for (place = size - 1; place > 0 && static_cast<Sum>(from[place]) != largest_entry;) --place;",
        ("tests/core/test_verify.py::test_of_equal_logits_the_lowest_id_wins",),
    ),
    Fault(
        "a program of several rows gives the logits of the first",
        "compiled programs",
        "emssd/model/compiled.py",
        "logits_to_keep = (starts + logits_to_keep).flatten()",
        "logits_to_keep = (0 * starts + logits_to_keep).flatten()",
        ("tests/models/test_compiled.py::test_tokens_are_those_of_greedy_decoding",),
    ),
    Fault(
        "a model that changed goes on with its old program",
        "compiled programs",
        "emssd/model/compiled.py",
        "if int(position_ids.min()) == 0 and (change",
        "if int(position_ids.min()) < 0 and (change",
        ("tests/models/test_compiled_changes.py::test_a_model_that_changes_later_runs_as_it_is",),
    ),
    Fault(
        "a window of masks is a token shorter than the model's",
        "models",
        "emssd/model/masks.py",
        "    return None if window >= length else window\n",
        "    return None if window >= length else window - 1\n",
        ("tests/models/test_masks.py::TestTheRuleOfAMask::test_windows_and_causal_masks_are_known",),
    ),
)
