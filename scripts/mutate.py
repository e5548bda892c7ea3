"""Break the code one line at a time and see that the tests notice.

In: `MUTATIONS`, a table of (file, a line as it is, the line as it would be wrong, the test that
must go red). Out: a line for each row and "N of N caught"; exit status 1 if any survived.

Each row runs on a copy of the package, in a process of its own; the checkout is never touched.
A row whose line no longer stands in the file exactly once is an error: the table is kept in step.

    python scripts/mutate.py             # all rows, a few minutes
    python scripts/mutate.py scheduler   # rows whose file or test contains the word
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
NUM_WORKERS = 2
TIMEOUT = 120  # seconds; a mutant that hangs is caught too


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "sampling_params.py",
        "if self.max_tokens is not None and self.min_tokens > self.max_tokens:",
        "if False:",
        "tests/test_sampling_params.py::test_min_tokens_over_max_tokens_is_refused",
    ),
    Mutation(
        "sampling_params.py",
        '"top_p": ("a number in (0, 1]", lambda v: _is_number(v, 0, 1) and v > 0)',
        '"top_p": ("a number in (0, 1]", lambda v: _is_number(v, 0, 1))',
        "tests/test_sampling_params.py::test_refused_value_is_named",
    ),
    Mutation(
        "config.py",
        "return wanted and not self.enforce_eager",
        "return wanted",
        "tests/test_config.py::test_device_and_compile_are_derived",
    ),
    Mutation(
        "model_config.py",
        "return int(self.original_max_position * self.factor)",
        "return trained",
        "tests/test_config.py::test_max_model_len_with_scaled_rope",
    ),
    Mutation(
        "model_config.py",
        'qk_norm=text.model_type.startswith("qwen3")',
        "qk_norm=False",
        "tests/test_config.py::test_facts",
    ),
    Mutation(
        "unsupported.py",
        '("mlp_bias", lambda c: c.get("mlp_bias") or None, "false"),',
        "",
        "tests/test_config.py::test_unsupported_is_refused_by_name",
    ),
    Mutation(
        "loader.py",
        "missing -= found",
        "pass",
        "tests/test_loader.py::test_logits_equal_transformers",
    ),
    Mutation(
        "loader.py",
        'if tie and (head in missing or torch.equal(parameters["lm_head.weight"], embedding)):',
        "if tie:",
        "tests/test_loader.py::test_head_is_tied_as_in_transformers",
    ),
    Mutation(
        "checkpoint.py",
        'is_pointer = file.read(11) == b"version htt"',
        "is_pointer = False",
        "tests/test_loader.py::test_git_lfs_pointer",
    ),
    Mutation(
        "gguf.py",
        "return pairs.transpose(1, 2).reshape(weight.shape)",
        "return pairs.reshape(weight.shape)",
        "tests/test_gguf.py::test_f32_file_gives_the_same_logits",
    ),
    Mutation(
        "gguf.py",
        "return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])",
        "return Sequence([ByteLevel(add_prefix_space=False)])",
        "tests/test_gguf.py::test_tokenizer_is_the_original",
    ),
    Mutation(
        "tokenizer.py",
        '"prompt_token_ids": hf.encode(text, add_special_tokens=False),',
        '"prompt_token_ids": hf.encode(text),',
        "tests/test_tokenizer.py::test_template_places_special_tokens_alone",
    ),
    Mutation(
        "prompts.py",
        "if len(ids) >= max_model_len:",
        "if len(ids) > max_model_len:",
        "tests/test_behaviours.py::test_prompt_of_max_model_len_is_refused_naming_both_numbers",
    ),
    Mutation(
        "tokenizer.py",
        "self._show(window[: len(window) - num_held])",
        "self._show(window)",
        "tests/test_tokenizer.py::test_text_grows_by_whole_characters",
    ),
    Mutation(
        "llm.py",
        "with self.engine.lock:  # another thread may step",
        "if True:",
        "tests/test_behaviours.py::test_a_streams_text_is_read_while_no_other_thread_steps",
    ),
    Mutation(
        "tokenizer.py",
        "for end in range(self._num_seen + 1, len(self._ids) + 1):",
        "for end in range(len(self._ids), len(self._ids) + 1):",
        "tests/test_tokenizer.py::test_it_makes_no_difference_when_text_is_read",
    ),
    Mutation(
        "tokenizer.py",
        "        if not self._params.stop:\n            return None\n",
        "",
        "tests/test_tokenizer.py::test_without_stop_strings_text_is_made_when_it_is_read",
    ),
    Mutation(
        "positions.py",
        "        places[end - n : end] if image is None",
        "        places[end - n - 1 : end - 1] if image is None",
        "tests/test_state_pool.py",
    ),
    Mutation(
        "tokenizer.py",
        "at, stop = min(found)",
        "at, stop = found[0]",
        "tests/test_tokenizer.py::test_stop_strings_equal_a_search_of_the_whole_text",
    ),
    Mutation(
        "tokenizer.py",
        "return len(text) - held",
        "return len(text)",
        "tests/test_tokenizer.py::test_nothing_of_a_stop_string_is_streamed",
    ),
    Mutation(
        "sequence.py",
        "may_stop = count >= params.min_tokens",
        "may_stop = True",
        "tests/test_tokenizer.py::test_no_stop_before_min_tokens",
    ),
    Mutation(
        "sequence.py",
        "hide = (is_eos or is_stop_id) and not params.include_stop_str_in_output",
        "hide = False",
        "tests/test_behaviours.py::test_stop_token_is_in_token_ids_and_not_in_text",
    ),
    Mutation(
        "sequence.py",
        "self.max_len = min(self.num_prompt_tokens + longest_answer, request.max_model_len)",
        "self.max_len = self.num_prompt_tokens + longest_answer",
        "tests/test_behaviours.py::test_prompt_and_max_tokens_over_max_model_len_end_there_with_length",
    ),
    Mutation(
        "sequence.py",
        'self.finish("stop", None if is_eos else token_id)',
        'self.finish("stop", token_id)',
        "tests/test_behaviours.py::test_end_of_sequence_is_the_union_of_three_files",
    ),
    Mutation(
        "request.py",
        "num_chars += len(completion.text)",
        "pass",
        "tests/test_behaviours.py::test_stream_items_concatenate_to_what_generate_returns",
    ),
    Mutation(
        "llm.py",
        'ids.update(as_list(generation_config.get("eos_token_id")))',
        "pass",
        "tests/test_behaviours.py::test_end_of_sequence_is_the_union_of_three_files",
    ),
    Mutation(
        "llm.py",
        "request.sequences.append(Sequence(request, i, (seed + i) % 2**63, detokenizer))",
        "request.sequences.append(Sequence(request, i, seed % 2**63, detokenizer))",
        "tests/test_behaviours.py::test_child_i_of_n_draws_with_seed_plus_i",
    ),
    Mutation(
        "llm.py",
        "self.scheduler.reset(s for r in self._requests.values() for s in r.sequences)",
        "pass",
        "tests/test_behaviours.py::test_next_generate_is_clean_after_an_exception_in_a_step",
    ),
    Mutation(
        "scheduler.py",
        "for seq in sorted(self.running, key=lambda s: s.num_remaining > 1):",
        "for seq in list(self.running):",
        "tests/test_scheduler.py::test_decoding_goes_first_even_where_older_sequences_need_more_tokens",
    ),
    Mutation(
        "caches.py",
        "if next_block is not None and next_block in in_progress:",
        "if False:",
        "tests/test_behaviours.py::test_shared_prefix_that_arrives_together_is_computed_once",
    ),
    Mutation(
        "scheduler.py",
        "victim = self.running.pop()",
        "victim = self.running.pop(0)",
        "tests/test_scheduler.py::test_newest_is_preempted_and_waits_in_front",
    ),
    Mutation(
        "scheduler.py",
        "budget += entry.num_tokens",
        "pass",
        "tests/test_scheduler.py::test_victim_that_is_in_the_step_already_leaves_it_and_its_budget",
    ),
    Mutation(
        "scheduler.py",
        "if self.num_preemptions == preemptions_before:",
        "if True:",
        "tests/test_scheduler.py::test_no_admission_in_a_step_that_preempts",
    ),
    Mutation(
        "caches.py",
        "return self.blocks.can_allocate(len(seq), prefix.blocks)",
        "return self.blocks.can_allocate(1, prefix.blocks)",
        "tests/test_scheduler.py::test_admission_leaves_room_for_the_whole_prompt_not_only_a_chunk",
    ),
    Mutation(
        "scheduler.py",
        "is_sampling = seq.num_remaining == 0",
        "is_sampling = True",
        "tests/test_scheduler.py::test_prompt_is_chunked_and_sampled_at_its_end_only",
    ),
    Mutation(
        "block_manager.py",
        "for i in range((len(seq) - 1) // self.block_size):",
        "for i in range(len(seq) // self.block_size):",
        "tests/test_block_manager.py::test_fully_cached_prompt_drops_its_last_block",
    ),
    Mutation(
        "block_manager.py",
        "return block if block is not None and self._contents[block] == content else None",
        "return block",
        "tests/test_scheduler_machine.py::test_invariants_hold_under_random_operations",
    ),
    Mutation(
        "block_manager.py",
        "self._forget(block)",
        "pass",
        "tests/test_scheduler_machine.py::test_invariants_hold_under_random_operations",
    ),
    Mutation(
        "block_manager.py",
        "ids = np.array((content.parent, *content.token_ids), dtype=np.int64)",
        "ids = np.array(content.token_ids, dtype=np.int64)",
        "tests/test_block_manager.py::test_hash_is_over_fixed_widths_order_and_parent",
    ),
    Mutation(
        "block_manager.py",
        "for block in reversed(seq.block_table):",
        "for block in seq.block_table:",
        "tests/test_block_manager.py::test_eviction_order_is_never_used_then_least_recent_and_tail_before_head",
    ),
    Mutation(
        "block_manager.py",
        "self._next_chain_id += 1",
        "pass",
        "tests/test_scheduler_machine.py::test_invariants_hold_under_random_operations",
    ),
    Mutation(
        "block_manager.py",
        "revived = sum(self._ref_counts[block] == 0 for block in prefix)",
        "revived = 0",
        "tests/test_block_manager.py::test_room_for_a_prefix_counts_its_freed_blocks_as_taken",
    ),
    Mutation(
        "batch.py",
        "seq_lens=upload(starts + q_lens, np.int32)",
        "seq_lens=upload([len(entry.seq) for entry in step], np.int32)",
        "tests/test_greedy.py::test_cold_and_warm_batches_equal_transformers",
    ),
    Mutation(
        "batch.py",
        "positions=upload(join(images, places, starts, q_lens), np.int64),",
        "positions=upload(join(images, places - starts[rows], starts, q_lens), np.int64),",
        "tests/test_greedy.py::test_prompts_alone_equal_transformers",
    ),
    Mutation(
        "batch.py",
        "positions = [entry.start + entry.num_tokens for entry in step]",
        "positions = [0 for entry in step]",
        "tests/test_sampler.py::test_seed_and_position_both_matter",
    ),
    Mutation(
        "batch.py",
        "first, last = max(start, done), min(start + num_tokens, seq.num_prompt_tokens - 1)",
        "first, last = start, min(start + num_tokens, seq.num_prompt_tokens - 1)",
        "tests/test_behaviours.py::test_prompt_logprobs_are_whole_after_preemption_amid_the_prompt",
    ),
    Mutation(
        "kernels/draw.py",
        "noisy.masked_fill_(values < thresholds.unsqueeze(-1), -math.inf)",
        "pass",
        "tests/test_sampler.py::test_draws_fit_the_filtered_distribution",
    ),
    Mutation(
        "kernels/gumbel.py",
        "return int(math.exp(-math.exp(-noise)) * 2**BITS) - 1",
        "return int(math.exp(-math.exp(-noise)) * 2**BITS) + 99999",
        "tests/test_sampler.py::test_draw_is_the_best_noisy_score_of_all_that_is_kept",
    ),
    Mutation(
        "kernels/draw.py",
        "scores = logits.sub_(logits.amax(-1, keepdim=True)).div_(",
        "scores = logits.div_(",
        "tests/test_sampler.py::test_tiny_temperature_is_greedy_and_huge_is_uniform",
    ),
    Mutation(
        "sampler.py",
        "raw = logits[wanted].log_softmax(-1) if wanted else None\n    _adjust(logits, sampling)",
        "_adjust(logits, sampling)\n    raw = logits[wanted].log_softmax(-1) if wanted else None",
        "tests/test_sampler.py::test_logprobs_are_raw",
    ),
    Mutation(
        "sampler.py",
        "logits[rows, ids] = torch.where(seen > 0, seen / factors, seen * factors)",
        "logits[rows, ids] = seen / factors",
        "tests/test_sampler.py::test_penalties_equal_the_plain_formulas",
    ),
    Mutation(
        "model_runner.py",
        'has_bf16 = kernels == "cpu" or cpu_features() & {"avx512_bf16", "amx_bf16", "bf16"}',
        "has_bf16 = True",
        "tests/test_config.py::test_dtype_is_chosen",
    ),
    Mutation(
        "models/qwen3.py",
        "normed, residual = self.post_attention_layernorm(hidden, residual)",
        "normed, _ = self.post_attention_layernorm(hidden, residual)",
        "tests/test_greedy.py::test_prompts_alone_equal_transformers",
    ),
    Mutation(
        "layers/rotary_embedding.py",
        "return stretch * inv_freq / config.factor + (1 - stretch) * inv_freq",
        "return inv_freq / config.factor",
        "tests/test_rotary.py::test_frequencies_equal_transformers",
    ),
    Mutation(
        "kernels/linear.py",
        "width = -(-shape[-1] // per_unit) * per_unit",
        "width = (shape[-1] // per_unit + 1) * per_unit",
        "tests/test_linear.py::test_rows_start_on_32_bytes_in_storage_rounded_up_only_when_needed",
    ),
    Mutation(
        "layers/linear.py",
        "is_whole = self.out_features * self.weight.itemsize % ROW_BYTES == 0",
        "is_whole = True",
        "tests/test_linear.py::test_rows_start_on_32_bytes_in_storage_rounded_up_only_when_needed",
    ),
    Mutation(
        "kernels/linear.py",
        "is_apart = all(stride >= x.shape[-1] for stride in strides)",
        "is_apart = True",
        "tests/test_linear.py::test_rows_that_overlap_are_refused",
    ),
    Mutation(
        "kernels/linear.py",
        "starts = (x.data_ptr(), *(stride",
        "starts = (0, *(stride",
        "tests/test_linear.py::test_out_that_breaks_the_contract_is_refused",
    ),
    Mutation(
        "kernels/linear.py",
        "return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(-1, x.shape[-1])",
        "return x.reshape(-1, x.shape[-1])",
        "tests/test_linear.py::test_out_that_flattening_would_misread_is_refused",
    ),
    Mutation(
        "kernels/linear.py",
        "out.addmm_(x, weight.T)",
        "out += x @ weight.T",
        "tests/test_linear.py::test_out_acc_adds_the_product_and_rounds_once",
    ),
    Mutation(
        "kernels/linear.py",
        "* factors[:, None] * scales",
        "* scales",
        "tests/test_linear.py::test_int8_weights_multiply_integers_of_each_token_and_row",
    ),
    Mutation(
        "kernels/linear.py",
        "(x / factors[:, None]).round().to(torch.int8)",
        "(x / factors[:, None]).to(torch.int8)",
        "tests/test_linear.py::test_int8_weights_multiply_integers_of_each_token_and_row",
    ),
    Mutation(
        "kernels/linear.py",
        "return scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]",
        "return scales.repeat(BLOCK, 1)[:N].repeat_interleave(BLOCK, 1)[:, :K]",
        "tests/test_linear.py::test_fp8_weights_have_a_scale_for_each_block",
    ),
    Mutation(
        "layers/linear.py",
        "stacked[name] = cut._replace(target=target)",
        "stacked[name] = cut",
        "tests/test_linear.py::test_ranks_of_merged_columns_are_the_products_part_by_part",
    ),
    Mutation(
        "layers/linear.py",
        "return Cut(count * unit, parallel.rank * length, length)",
        "return Cut(count * unit, 0, length)",
        "tests/test_linear.py::test_ranks_of_columns_side_by_side_are_the_product",
    ),
    Mutation(
        "layers/linear.py",
        "group = Parallel(parallel.rank // copies, groups)",
        "group = Parallel(parallel.rank % groups, groups)",
        "tests/test_linear.py::test_every_query_head_finds_its_keys_on_its_rank",
    ),
    Mutation(
        "layers/linear.py",
        "if self._parallel.rank > 0:  # a bias",
        "if False:  # a bias",
        "tests/test_linear.py::test_ranks_of_rows_add_up_to_the_product_and_one_bias",
    ),
    Mutation(
        "layers/parameter.py",
        "if [*tensor.shape] != shape or tensor.dtype not in _FLOATS:",
        "if tensor.dtype not in _FLOATS:",
        "tests/test_linear.py::test_wrong_shapes_are_refused_and_never_broadcast",
    ),
    Mutation(
        "layers/linear.py",
        "self.weight.data = torch.empty(0, dtype=self.weight.dtype)",
        "pass",
        "tests/test_linear.py::test_packing_leaves_one_copy_of_the_weight",
    ),
    Mutation(
        "kernels/linear.py",
        "torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)",
        "weight.to_mkldnn()",
        "tests/test_linear.py::test_one_packing_serves_every_number_of_rows",
    ),
    Mutation(
        "kernels/linear.py",
        "return None if packed is None or packed.blocks is None else packed",
        "return packed",
        "tests/test_linear.py::test_tied_head_stays_the_embeddings_matrix_where_no_blocks_are_known",
    ),
    Mutation(
        "kernels/linear.py",
        "else None\n\n\ndef _prepare",
        "else blocks\n\n\ndef _prepare",
        "tests/test_linear.py::test_blocks_that_lie_in_another_order_are_not_used",
    ),
    Mutation(
        "kernels/linear.py",
        "N // _NUM_PROBES | 1",
        "max(1, N // _NUM_PROBES)",
        "tests/test_linear.py::test_blocks_that_lie_in_another_order_are_not_used",
    ),
    Mutation(
        "kernels/linear.py",
        "values.clamp(0, _UINT8_MAX)",
        "values",
        "tests/test_linear.py::test_tokens_use_all_256_values_and_zero_is_exact",
    ),
    Mutation(
        "kernels/linear.py",
        "units[ids // BLOCK_ROWS, :, ids % BLOCK_ROWS]",
        "units[ids % len(units), :, ids % BLOCK_ROWS]",
        "tests/test_linear.py::test_tied_head_is_packed_once_and_the_embedding_reads_its_blocks",
    ),
    Mutation(
        "kernels/linear.cpp",
        "sums[i] - of_row[m].zero * sums_of_w[n + i]",
        "sums[i]",
        "tests/test_linear.py::test_int8_blocks_give_the_references_bits",
    ),
    Mutation(
        "kernels/linear.cpp",
        "has_nan |= value != value;",
        "",
        "tests/test_linear.py::test_nan_makes_its_row_nan_and_no_other",
    ),
    Mutation(
        "kernels/linear.cpp",
        "int32_t(value < 0 ? 0 : value > 255 ? 255 : value)",
        "int32_t(value)",
        "tests/test_linear.py::test_int8_blocks_give_the_references_bits",
    ),
    Mutation(
        "kernels/linear.cpp",
        "count = i % 2 == 0 && i + 1 < end ? 2 : 1;",
        "count = i + 1 < end ? 2 : 1;",
        "tests/test_linear.py::test_bits_of_a_row_depend_on_neither_neighbours_nor_threads",
    ),
    Mutation(
        "kernels/linear.cpp",
        "(bias ? widen(bias[n + i]) : 0)",
        "0",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/linear.cpp",
        "(bias ? load(bias + n + i) : vf{})",
        "vf{}",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/linear.cpp",
        "first < s.M; first += PANEL",
        "first < std::min(s.M, PANEL); first += PANEL",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/blocks.h",
        "weights[c] << 16 : weights[c] & 0xffff0000u",
        "weights[c] << 16 : weights[c]",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/blocks.h",
        "parts[2] = {x << 16, x & 0xffff0000u};",
        "parts[2] = {x << 16, x};",
        "tests/test_linear.py::test_bits_of_a_row_depend_on_neither_neighbours_nor_threads",
    ),
    Mutation(
        "kernels/blocks.h",
        "x += 4 * SPLIT<T> * CHUNK",
        "x += 4 * CHUNK",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/linear.py",
        "is_fast = has_amx or bool(library.nanoinfer_has_pairs())",
        "is_fast = True",
        "tests/test_linear.py::test_onednn_multiplies_many_rows_where_it_is_fast",
    ),
    Mutation(
        "kernels/build.py",
        '_cpuinfo("vendor_id") == "GenuineIntel"',
        '_cpuinfo("vendor_id") != "AuthenticAMD"',
        "tests/test_kernel_build.py::test_pairs_are_avoided_where_they_are_slow",
    ),
    Mutation(
        "kernels/paged_attention.cpp",
        "const int seen = std::min<int64_t>(n, last + 1 - begin);",
        "const int seen = std::min<int64_t>(n, last - begin);",
        "tests/test_paged_attention.py::test_big_chunk",
    ),
    Mutation(
        "kernels/attention_tiles.h",
        "acc[r] += (vf)(x & 0xffff0000u) * load(row + W);",
        "acc[r] += (vf)(x & 0xffff0000u) * load(row);",
        "tests/test_paged_attention.py::test_bf16_error_is_at_most_twice_the_reference_error",
    ),
    Mutation(
        "kernels/blocks.h",
        "rows = (t + 1) * s.M / tiles - m;",
        "rows = s.M / tiles;",
        "tests/test_linear.py::test_bf16_blocks_give_the_exact_sum_rounded_once",
    ),
    Mutation(
        "kernels/linear.cpp",
        "first + m, i * HALF,",
        "m, i * HALF,",
        "tests/test_linear.py::test_int8_blocks_give_the_references_bits",
    ),
    Mutation(
        "layers/linear.py",
        "return self._packed.multiply(x, self.bias, True)",
        "return self._packed.multiply(x, self.bias, False).float()",
        "tests/test_linear.py::test_wide_is_the_sum_before_it_is_rounded",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "hidden = x.float()",
        "hidden = x",
        "tests/test_layernorm.py::test_sum_of_squares_in_fp16_overflows_where_ours_is_finite",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "return rms_norm_ref(residual, weight, eps, out_scale), residual",
        "return rms_norm_ref(x, weight, eps, out_scale), residual",
        "tests/test_layernorm.py::test_add_then_norm_equals_transformers",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "    if weight.dtype != x.dtype:\n",
        "    if True:\n",
        "tests/test_layernorm.py::test_plain_form_equals_transformers",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "return (normed.float() * F.silu(gate.float())).to(x.dtype)",
        "return normed * F.silu(gate)",
        "tests/test_layernorm.py::test_gate_is_applied_in_fp32",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "keepdim=True) + eps) * out_scale",
        "keepdim=True) + eps)",
        "tests/test_layernorm.py::test_out_scale_multiplies_the_normalised_row",
    ),
    Mutation(
        "kernels/rms_norm.py",
        "height = T + -T % PACK",
        "height = T",
        "tests/test_layernorm.py::test_columns_of_scales_start_on_16_bytes",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "put(t, g, has_nan ? NAN : amax / FP8_MAX)",
        "put(t, g, amax / FP8_MAX)",
        "tests/test_layernorm.py::test_nan_makes_its_group_nan_and_no_other",
    ),
    Mutation(
        "kernels/quantize.py",
        "+ (bits & _MANTISSA).ne(0)",
        "+ 1",
        "tests/test_layernorm.py::test_packed_bytes_are_exponents_rounded_up",
    ),
    Mutation(
        "kernels/quantize.py",
        ".clamp(min=MIN_AMAX) / FP8_MAX",
        ".div(FP8_MAX)",
        "tests/test_layernorm.py::test_zero_rows_have_a_scale",
    ),
    Mutation(
        "layers/layernorm.py",
        "tensor = 1 + tensor.float()",
        "tensor = (1 + tensor).float()",
        "tests/test_layernorm.py::test_folding_one_plus_in_bf16_would_lose_bits",
    ),
    Mutation(
        "layers/layernorm.py",
        "tensor = tensor.float().exp()",
        "tensor = tensor.exp()",
        "tests/test_layernorm.py::test_checkpoint_of_each_form_is_loaded",
    ),
    Mutation(
        "kernels/__init__.py",
        '{"emulate_precision_casts": True}',
        '{"emulate_precision_casts": False}',
        "tests/test_layernorm.py::test_compiled_add_and_norm_is_one_fused_kernel",
    ),
    Mutation(
        "kernels/rotary.py",
        "y1, y2 = (x1 * cos - x2 * sin).to(x.dtype)",
        "y1, y2 = (x1 * cos + x2 * sin).to(x.dtype)",
        "tests/test_rotary.py::test_rotary_equals_transformers",
    ),
    Mutation(
        "layers/rotary_embedding.py",
        "axes[axis : MROPE_AXES * section[axis] : MROPE_AXES] = axis",
        "axes[axis::MROPE_AXES] = axis",
        "tests/test_rotary.py::test_axes_of_frequencies",
    ),
    Mutation(
        "layers/rotary_embedding.py",
        "if 2 * len(inv_freq) != config.rotary_dim:",
        "if False:",
        "tests/test_rotary.py::test_a_table_narrower_than_what_is_turned_is_refused",
    ),
    Mutation(
        "layers/rotary_embedding.py",
        "inv_freq = inv_freq[inv_freq <= highest]",
        "inv_freq = inv_freq[inv_freq >= highest]",
        "tests/test_rotary.py::test_pruning_leaves_slow_frequencies_and_then_every_nth",
    ),
    Mutation(
        "layers/rotary_embedding.py",
        "if len(section) != MROPE_AXES or sum(section) != num_frequencies:",
        "if len(section) != MROPE_AXES:",
        "tests/test_rotary.py::test_sections_that_are_not_the_frequencies_are_refused",
    ),
    Mutation(
        "model_config.py",
        'is_mrope_interleaved=bool(rope.get("mrope_interleaved", is_qwen3_5(hf)))',
        "is_mrope_interleaved=False",
        "tests/test_rotary.py::test_interleaved_sections_equal_transformers_qwen3_5",
    ),
    Mutation(
        "kernels/rotary.py",
        "return rope.cos_sin.gather(0, positions[rope.axes].T)",
        "return rope.cos_sin[positions[0]]",
        "tests/test_rotary.py::test_sections_in_blocks_equal_transformers_qwen2_vl",
    ),
    Mutation(
        "kernels/rotary.py",
        "        sin = -sin",
        "        pass",
        "tests/test_rotary.py::test_conjugate_turns_back",
    ),
    Mutation(
        "kernels/rotary.py",
        "start, stop = rope.offset, rope.offset + 2 * cos.size(-1)",
        "start, stop = 0, 2 * cos.size(-1)",
        "tests/test_rotary.py::test_a_part_of_a_head_is_turned_and_the_rest_passes",
    ),
    Mutation(
        "kernels/rows.h",
        "table[positions[axes[c] * T + t] * R + c]",
        "table[positions[t] * R + c]",
        "tests/test_cpu_kernels.py::test_rotary",
    ),
    Mutation(
        "kernels/rows.h",
        "sign = is_conjugate ? -1 : 1;",
        "sign = 1;",
        "tests/test_cpu_kernels.py::test_rotary",
    ),
    Mutation(
        "kernels/norm_rope_store.cpp",
        "keys, t, (const Weight*)k_weight, at",
        "keys, t, (const Weight*)q_weight, at",
        "tests/test_cpu_kernels.py::test_norm_rope_store_is_the_three_kernels_in_turn",
    ),
    Mutation(
        "kernels/norm_rope_store.cpp",
        "return T + t;",
        "return t;",
        "tests/test_cpu_kernels.py::test_norm_rope_store_writes_nothing_for_a_bad_position_or_slot",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "narrow(widen(out[i + k]) * wide[k], out + i + k)",
        "narrow(widen(out[i + k]) + wide[k], out + i + k)",
        "tests/test_cpu_kernels.py::test_rms_norm_gated",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "0x7ffff + ((magnitude >> 20) & 1)",
        "0x80000",
        "tests/test_cpu_kernels.py::test_quantised_norm_is_the_norm_quantised",
    ),
    Mutation(
        "kernels/simd.h",
        "return (g < 0.f ? g * e : g) / (1.f + e);",
        "return g / (1.f + e);",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "kernels/store_kv.cpp",
        "(const char*)v + t * v_stride",
        "(const char*)k + t * v_stride",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "layers/attention.py",
        "self._scale = head_dim**-0.5",
        "self._scale = 1.0",
        "tests/test_attention_layer.py::test_prompts_are_dense_causal_attention",
    ),
    Mutation(
        "layers/attention.py",
        "turning = (self._norms, batch.positions",
        "turning = (None, batch.positions",
        "tests/test_attention_layer.py::test_prompts_are_dense_causal_attention",
    ),
    Mutation(
        "kernels/norm_rope_store.py",
        "k = rms_norm_ref(k, norms.k_weight, norms.eps)",
        "k = rms_norm_ref(k, norms.q_weight, norms.eps)",
        "tests/test_attention_layer.py::test_reference_is_its_parts_one_after_the_other",
    ),
    Mutation(
        "kernels/norm_rope_store.cpp",
        "E* turned_k = is_plain ? (E*)k_cache + slot * D",
        "E* turned_k = is_plain ? (E*)k_cache + (slot + 1) * D",
        "tests/test_attention_layer.py::test_keys_and_values_land_in_their_slots_and_nowhere_else",
    ),
    Mutation(
        "kernels/rows.h",
        "return i % T;",
        "return i;",
        "tests/test_cpu_kernels.py::test_a_bad_position_of_any_axis_is_refused",
    ),
    Mutation(
        "kernels/rows.h",
        '#define NO_CONTRACTION __attribute__((optimize("fp-contract=off")))',
        "#define NO_CONTRACTION",
        "tests/test_cpu_kernels.py::test_rotary",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "std::nearbyint(size * 512)",
        "(size * 512)",
        "tests/test_cpu_kernels.py::test_quantised_norm_is_the_norm_quantised",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "(bits >> 23) + ((bits & 0x7fffff) != 0)",
        "(bits >> 23)",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "kernels/rms_norm.cpp",
        "from = added + i * N;",
        "from = x + offset(0);",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "kernels/norm_rope_store.cpp",
        "(E*)v_cache + (slot + h) * D);",
        "(E*)v_cache + slot * D);",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "kernels/simd.h",
        "return x < -87.f ? vf{} : exp2(",
        "return exp2(",
        "tests/test_cpu_kernels.py::test_silu_of_extremes_is_the_references",
    ),
    Mutation(
        "kernels/silu_mul.cpp",
        "std::copy(up + i, up + N, rest[2]);",
        "std::copy(gate + i, gate + N, rest[2]);",
        "tests/test_selftest.py::test_kernels_pass_on_this_machine",
    ),
    Mutation(
        "kernels/paged_attention.py",
        "attn_mask=key_position <= position[:, None],  # [q_len, L]",
        "attn_mask=None,",
        "tests/test_greedy.py::test_prompts_alone_equal_transformers",
    ),
    Mutation(
        "kernels/attention_tiles.h",
        "const vf old = exp2(load(m) - top);",
        "const vf old = exp2(top - top);",
        "tests/test_paged_attention.py::test_big_chunk",
    ),
    Mutation(
        "kernels/attention_tiles.h",
        "*decay = std::exp2(*m - highest);",
        "*decay = 1;",
        "tests/test_quantized_kv.py::test_attention_twin",  # plain caches need one step an item
    ),
    Mutation(
        "kernels/simd.h",
        "*p = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;",
        "*p = bits >> 16;",
        "tests/test_paged_attention.py::test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan",
    ),
    Mutation(
        "kernels/draw.py",
        "pool, target = pool[~is_upper], target - mass",
        "pool = pool[~is_upper]",
        "tests/test_sampler.py::test_thresholds_equal_a_full_sort",
    ),
    Mutation(
        "kernels/draw.cpp",
        "x = (x ^ (x >> 13)) * 0xc2b2ae35u;",
        "x = (x ^ (x >> 12)) * 0xc2b2ae35u;",
        "tests/test_sampler.py::test_draw_is_the_best_noisy_score_of_all_that_is_kept",
    ),
    Mutation(
        "kernels/draw.cpp",
        "(MASK + 1.0) - 1;",
        "(MASK + 1.0) + 99999;",
        "tests/test_sampler.py::test_draw_is_the_best_noisy_score_of_all_that_is_kept",
    ),
    Mutation(
        "kernels/draw.cpp",
        "float(best - MAX_NOISE - 1e-3)",
        "float(best - MAX_NOISE / 4)",
        "tests/test_sampler.py::test_draw_is_the_best_noisy_score_of_all_that_is_kept",
    ),
    Mutation(
        "kernels/draw.cpp",
        "if (pool.size() > count) cut();",
        "",
        "tests/test_sampler.py::test_the_last_id_that_is_kept_can_be_drawn_and_the_next_one_cannot",
    ),
    Mutation(
        "kernels/draw.cpp",
        "      target -= mass;",
        "",
        "tests/test_sampler.py::test_the_last_id_that_is_kept_can_be_drawn_and_the_next_one_cannot",
    ),
    Mutation(
        "kernels/draw.cpp",
        "search(pool, target - before)",
        "search(pool, target)",
        "tests/test_sampler.py::test_the_last_id_that_is_kept_can_be_drawn_and_the_next_one_cannot",
    ),
    Mutation(
        "kernels/draw.cpp",
        "const vf mass = x >= least ? exp_of_negative(x) : vf{};",
        "const vf mass = exp_of_negative(x);",
        "tests/test_sampler.py::test_the_last_id_that_is_kept_can_be_drawn_and_the_next_one_cannot",
    ),
    Mutation(
        "kernels/draw.cpp",
        "- row) % V;",
        "- row);",
        "tests/test_sampler.py::test_rows_without_a_largest_logit_draw_some_id_of_the_vocabulary",
    ),
    Mutation(
        "cpu_graphs.py",
        "    static.slot_mapping.copy_(batch.slot_mapping)\n",
        "",
        "tests/test_cpu_graphs.py::test_replayed_steps_give_the_tokens_of_the_layers",
    ),
    Mutation(
        "cpu_graphs.py",
        "        recording.embedded.copy_(embedded)\n",
        "",
        "tests/test_cpu_graphs.py::test_hidden_states_are_the_same_bits",
    ),
    Mutation(
        "kernels/record.py",
        "self._set, self._count = index % 2, 0",
        "self._set, self._count = 0, 0",
        "tests/test_cpu_graphs.py::test_buffers_are_shared_by_every_other_layer",
    ),
    Mutation(
        "kernels/record.py",
        "        if func.is_view:",
        "        if func:",
        "tests/test_cpu_graphs.py::test_an_operator_that_computes_cannot_be_recorded",
    ),
    Mutation(
        "kernels/attention_tiles.h",
        "x[i] = (vu)p[i] + 0x7fff + (((vu)p[i] >> 16) & 1);",
        "x[i] = (vu)p[0] + 0x7fff;",
        "tests/test_paged_attention.py::test_bf16_error_is_at_most_twice_the_reference_error",
    ),
    Mutation(
        "models/qwen3.py",
        "residual = residual if rows is None else residual[rows]",
        "residual = residual if rows is None else residual[: len(rows)]",
        "tests/test_greedy.py",
    ),
    Mutation(
        "kernels/__init__.py",
        'logger.warning("no C++ kernels',
        'logger.info("no C++ kernels',
        "tests/test_behaviours.py::test_without_a_compiler_ids_are_the_same_after_one_warning",
    ),
    Mutation(
        "kernels/gated_delta.py",
        "before = state[source] if source != NULL_SLOT else torch.zeros_like(state[source])",
        "before = state[source]",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.py",
        "k = k.repeat_interleave(per_key, 1)",
        "k = k.repeat(1, per_key, 1)",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.py",
        "state = state * g[:, t, None, None].exp()",
        "state = state + 0",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.py",
        'error = v[:, t] - torch.einsum("hk,hkv->hv", k[:, t], state)',
        "error = v[:, t]",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.py",
        "known = bc[..., None] * (vc - G.exp()[..., None] * (kc @ state))",
        "known = bc[..., None] * (vc - kc @ state)",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.py",
        "left = (G[:, -1:] - G).exp()[..., None] * kc",
        "left = kc",
        "tests/test_gated_delta.py::test_rule_in_chunks_of_any_size_is_the_whole",
    ),
    Mutation(
        "kernels/gated_delta.cpp",
        "const int64_t shared = head / (HV / HK);",
        "const int64_t shared = head % HK;",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.cpp",
        "const float* from = sources[s] ? state + (sources[s] * HV + head) * size : nullptr;",
        "const float* from = state + (sources[s] * HV + head) * size;",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.cpp",
        "store(answer + c * W, asked[c] * token.decay + u[c] * token.qk);",
        "store(answer + c * W, asked[c] * token.decay);",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/gated_delta.cpp",
        "float* to = state + (slots[s] * HV + head) * size;",
        "float* to = state + (sources[s] * HV + head) * size;",
        "tests/test_gated_delta.py::test_rule_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/causal_conv.py",
        "kept = state[source] if source != NULL_SLOT else torch.zeros_like(state[source])",
        "kept = state[source]",
        "tests/test_gated_delta.py::test_conv_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/causal_conv.cpp",
        "const T* row = row_at(last - first - K1 + j);",
        "const T* row = row_at(j);",
        "tests/test_gated_delta.py::test_conv_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/causal_conv.cpp",
        "if (sources[s] == 0)",
        "if (false)",
        "tests/test_gated_delta.py::test_conv_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/sigmoid_mul.py",
        "return x * gate.sigmoid()",
        "return x * gate",
        "tests/test_loader.py::test_logits_equal_transformers",
    ),
    Mutation(
        "layers/gated_delta_net.py",
        "z = z.unflatten(-1, out.shape[1:])",
        "z = torch.zeros_like(out)",
        "tests/test_gated_delta.py::test_layer_equals_transformers",
    ),
    Mutation(
        "layers/gated_delta_net.py",
        "load_whole(self.weight.data, tensor.flatten(1).T)",
        "load_whole(self.weight.data, tensor.flatten(1).T.flip(0))",
        "tests/test_gated_delta.py::test_layer_equals_transformers",
    ),
    Mutation(
        "layers/attention.py",
        "gate, q = q[..., self._head_dim :], q[..., : self._head_dim]",
        "q, gate = q[..., -self._head_dim :], q[..., : self._head_dim]",
        "tests/test_loader.py::test_logits_equal_transformers",
    ),
    Mutation(
        "models/qwen3.py",
        'form: Form = "one_plus" if config.norm_adds_one else "plain"',
        'form: Form = "plain"',
        "tests/test_loader.py::test_logits_equal_transformers",
    ),
    Mutation(
        "state_pool.py",
        "self._read(seq, self._snapshots[known[depth - 1]])",
        "pass",
        "tests/test_state_pool.py::test_a_prefix_hit_at_every_block_equals_transformers",
    ),
    Mutation(
        "state_pool.py",
        "if slot != NULL_SLOT and self._num_readers[slot] == 0:",
        "if slot != NULL_SLOT:",
        "tests/test_state_pool.py::test_a_slot_is_not_free_while_somebody_is_about_to_read_it",
    ),
    Mutation(
        "cpu_graphs.py",
        "static.states.copy_(batch.states)",
        "pass",
        "tests/test_cpu_graphs.py::test_replayed_steps_give_the_tokens_of_the_layers",
    ),
    Mutation(
        "cpu_graphs.py",
        "static, inputs = self._make_static(batch), torch.zeros_like(embedded)",
        "static, inputs = batch, embedded",
        "tests/test_cpu_graphs.py::test_a_step_that_cannot_be_recorded_is_done_once",
    ),
    Mutation(
        "cuda_graphs.py",
        "target[..., values.shape[-1] :].zero_()",
        "pass",
        "tests/test_cuda_graphs.py::test_replays_leave_others_alone_and_give_the_same_tokens",
    ),
    Mutation(
        "fp8.py",
        "if all(n % BLOCK == 0 for n in cuts):",
        "if False:",
        "tests/test_fp8.py::test_kept_weights_are_the_checkpoints_values",
    ),
    Mutation(
        "state_pool.py",
        "slot, seq.state.slot = seq.state.slot, NULL_SLOT",
        "slot = seq.state.slot",
        "tests/test_scheduler_machine.py::test_invariants_hold_under_random_operations",
    ),
    Mutation(
        "state_pool.py",
        "return next((p for p in seq.state.snapshot_points if seq.num_computed < p < end), end)",
        "return end",
        "tests/test_state_pool.py::test_a_prompt_stops_behind_its_last_full_block_and_goes_on_in_another_slot",
    ),
    Mutation(
        "state_pool.py",
        "if planner is seq and (reached is None or reached >= point):",
        "if planner is seq and reached is not None and reached >= point:",
        "tests/test_state_pool.py::test_who_waits_for_a_plan_goes_on_when_it_was_given_up",
    ),
    Mutation(
        "state_pool.py",
        "self.forget(seq.state.answer_chain)",
        "pass",
        "tests/test_state_pool.py::test_an_answer_keeps_one_state_and_takes_nobody_elses_place",
    ),
    Mutation(
        "state_pool.py",
        "self._snapshots.move_to_end(known[depth - 1])",
        "pass",
        "tests/test_state_pool.py::test_the_least_recently_used_snapshot_goes_first",
    ),
    Mutation(
        "caches.py",
        "blocks.when_forgotten = states.forget",
        "pass",
        "tests/test_state_pool.py::test_a_snapshot_dies_with_the_block_that_leads_to_it",
    ),
    Mutation(
        "caches.py",
        "return Prefix(known[:depth], known)",
        "return Prefix(known, known)",
        "tests/test_state_pool.py::test_prompts_that_arrive_together_wait_for_the_point_where_they_part",
    ),
    Mutation(
        "caches.py",
        "return self.states.is_planned(self.blocks.chain_ids(prefix.known)[-1])",
        "return False",
        "tests/test_state_pool.py::test_prompts_that_arrive_together_wait_for_the_point_where_they_part",
    ),
    Mutation(
        "cache_sizes.py",
        'share = rest - config.num_kv_blocks * costs["block"]',
        "share = rest",
        "tests/test_state_pool.py::test_few_states_mean_few_sequences_at_once",
    ),
    Mutation(
        "block_manager.py",
        "self._contents[heir], self._chain_ids[heir] = content, chain_id",
        "self._contents[heir], self._chain_ids[heir] = content, self._next_chain_id",
        "tests/test_state_pool.py::test_a_snapshot_lives_on_with_the_copy_of_its_block",
    ),
    Mutation(
        "positions.py",
        "self._offset = int(given.max()) + 1 - given.shape[1]",
        "self._offset = 0",
        "tests/test_state_pool.py::test_three_axis_positions_equal_transformers",
    ),
    Mutation(
        "block_manager.py",
        'return BlockContent(parent, ids, b"" if images is None else images.key(start, stop))',
        "return BlockContent(parent, ids)",
        "tests/test_state_pool.py::test_three_axis_positions_equal_transformers",
    ),
    Mutation(
        "kernels/moe.py",
        "weights = weights / weights.sum(-1, keepdim=True)",
        "pass",
        "tests/test_moe.py::test_mixture_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/moe.py",
        "tokens = own // routing.top_k",
        "tokens = own % len(x)",
        "tests/test_moe.py::test_mixture_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/moe.cpp",
        "p[e] = -1;",
        "",
        "tests/test_moe.py::test_mixture_is_what_one_writes_by_hand",
    ),
    Mutation(
        "kernels/moe.cpp",
        "for (int64_t i = first[e]; i < first[e + 1]; i += PANEL)",
        "for (int64_t i = first[e]; i < first[e + 1]; i += 2 * PANEL)",
        "tests/test_moe.py::test_all_tokens_at_one_expert_are_more_than_a_panel",
    ),
    Mutation(
        "layers/moe.py",
        'first = self._inner if kind == "up_proj" else 0',
        'first = 0 if kind == "up_proj" else self._inner',
        "tests/test_loader.py::test_logits_equal_transformers",
    ),
    Mutation(
        "hybrid_config.py",
        "layers=frozenset(layers - set(dense or ())) if hf.num_experts > 0 else frozenset(),",
        "layers=frozenset(layers),",
        "tests/test_moe.py::test_which_layers_are_a_mixture",
    ),
    Mutation(
        "kernels/quantized_kv.py",
        "return wide.flatten(-2) * size**-0.5",
        "return wide.flatten(-2) / size",
        "tests/test_quantized_kv.py::test_a_rotation_is_the_normalised_hadamard_matrix",
    ),
    Mutation(
        "kernels/quantized_kv.py",
        "return (values.round() if dtype == torch.int8 else values).to(dtype), scales",
        "return values.to(dtype), scales",
        "tests/test_quantized_kv.py::test_a_value_is_at_most_half_a_step_off",
    ),
    Mutation(
        "kernels/paged_attention.py",
        "        return hadamard(out).to(q.dtype)",
        "        return out",
        "tests/test_quantized_kv.py::test_reference_is_attention_over_what_was_stored",
    ),
    Mutation(
        "kernels/norm_rope_store.py",
        "q, k, v = hadamard(q).to(q.dtype), hadamard(k), hadamard(v)",
        "k, v = hadamard(k), hadamard(v)",
        "tests/test_quantized_kv.py::test_store_twin",
    ),
    Mutation(
        "kernels/heads.h",
        "(vf)(size + (121u << 23)) - SMALLEST",
        "(vf)(size + (121u << 23))",
        "tests/test_quantized_kv.py::test_attention_twin",
    ),
    Mutation(
        "kernels/heads.h",
        "(bits + 0x7ffff + (bits >> 20 & 1))",
        "(bits + 0x7ffff)",
        "tests/test_quantized_kv.py::test_store_twin",
    ),
    Mutation(
        "kernels/paged_attention.cpp",
        "if (scales.is_rotated) hadamard(scratch, D);",
        "",
        "tests/test_quantized_kv.py::test_attention_twin",
    ),
    Mutation(
        "kernels/paged_attention.cpp",
        "widen_head(v + head * D, scales.v[head], D, out + apart);",
        "widen_head(v + head * D, scales.k[head], D, out + apart);",
        "tests/test_quantized_kv.py::test_attention_twin",
    ),
    Mutation(
        "kernels/norm_rope_store.cpp",
        "v8.put(slot + h, values.at(t, h), D, wide.data());",
        "v8.put(slot, values.at(t, h), D, wide.data());",
        "tests/test_quantized_kv.py::test_store_twin",
    ),
    Mutation(
        "layers/quantized_kv_cache.py",
        "return super().bytes_per_unit(block_size) + scales",
        "return super().bytes_per_unit(block_size)",
        "tests/test_quantized_kv.py::test_a_spec_counts_what_it_allocates",
    ),
    Mutation(
        "block_manager.py",
        "num_known = min(seq.num_computed, len(seq.token_ids))",
        "num_known = seq.num_computed",
        "tests/test_scheduler_machine.py",
    ),
    Mutation(
        "sequence.py",
        "return self.num_pending > 0 and len(self.token_ids) + self.num_pending >= self.max_len",
        "return False",
        "tests/test_pipeline.py::test_a_step_is_launched_before_the_one_before_is_waited_for",
    ),
    Mutation(
        "scheduler.py",
        "            if seq.is_finished:\n                continue\n            seq.num_pending",
        "            seq.num_pending",
        "tests/test_scheduler_machine.py",
    ),
    Mutation(
        "scheduler.py",
        "                    victim.num_pending -= entry.is_sampling\n",
        "",
        "tests/test_scheduler_machine.py",
    ),
    Mutation(
        "scheduler.py",
        "            seq.num_pending = 0\n",
        "",
        "tests/test_scheduler_machine.py",
    ),
    Mutation(
        "pipeline.py",
        "seq.pending_row = row",
        "seq.pending_row = 0",
        "tests/test_pipeline.py::test_greedy_ids_equal_transformers",
    ),
    Mutation(
        "pipeline.py",
        "and not any(map(_needs_tokens, step))",
        "",
        "tests/test_pipeline.py::test_answers_do_not_depend_on_it",
    ),
    Mutation(
        "pipeline.py",
        "self._is_async = wanted and scheduler.caches.states is None",
        "self._is_async = wanted",
        "tests/test_pipeline.py::test_states_are_waited_for",
    ),
    Mutation(
        "batch.py",
        "if positions[row] - seq.num_prompt_tokens < p.min_tokens:",
        "if seq.num_output_tokens < p.min_tokens:",
        "tests/test_pipeline.py::test_min_tokens_counts_what_is_pending",
    ),
]


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in MUTATIONS if word in m.file or word in m.test]
    for mutation in chosen:
        count = (ROOT / "nanoinfer" / mutation.file).read_text().count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.file}: {mutation.old!r} is there {count} times, need 1")
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        results = list(pool.map(run, chosen))
    print(f"{sum(results)} of {len(chosen)} caught")
    return 0 if all(results) else 1


def run(mutation: Mutation) -> bool:
    """True if the test fails on the broken copy."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("nanoinfer", "tests"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copy(ROOT / "pyproject.toml", tree)
        path = tree / "nanoinfer" / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, mutation.test],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            is_caught = done.returncode == 1  # 1: tests ran and failed; others: nothing ran
        except subprocess.TimeoutExpired:
            is_caught = True
    verdict = "caught  " if is_caught else "SURVIVED"
    print(f"{verdict} {mutation.file}: {mutation.new.strip()!r:.60} ({mutation.test})", flush=True)
    return is_caught


if __name__ == "__main__":
    sys.exit(main())
