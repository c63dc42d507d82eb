"""Every kind of corruption that is tested: where it strikes, what is damaged, how it is caught, and by which test.

`python -m tests.corruption_kinds` writes docs/corruptions.md, which a test holds against this table.
"""

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "docs" / "corruptions.md"
_INTRODUCTION = """# What is tried to break it

Every row below was done to real files, answers or states of a run in miniature. What is damaged is caught before it can
train or serve, by an error that names the file, the field or the sequence; or it is set aside with a reason while the
rest goes on; or it is mended, because it can be made again. The last column is the test that does it.
`tests/unit/test_damaged_files.py` damages each kind of file at random places (`EAGLE3_DAMAGES=1000` tries more), and
`make fuzz` gives the readers bytes, words and answers that nobody has thought of.

The other half of a check is that it is silent where nothing is wrong. A thousand answers of a model in miniature, half
of them greedy, go from the server's answer through audit, corpus and capture without one alarm
(`tests/unit/test_false_alarms.py`). What no check can know: a bit that changes a log-probability by less than rounding
does, and a row whose tokens and hashes were changed together by somebody who wants to.

"""


@dataclass(frozen=True)
class Kind:
    """One kind of corruption; `test` is a file under tests/ and a function in it."""

    stage: str
    what: str
    caught: str
    test: str


KINDS = (
    Kind(
        "prompts",
        "a gzip, zstd or Parquet file that breaks off, lacks its checksum, or is of another format",
        "PromptSourceError with the file",
        "unit/test_prompts.py::test_a_file_that_breaks_off_or_is_of_another_format_is_an_error_that_names_it",
    ),
    Kind(
        "prompts",
        "a line without end",
        "PromptSourceError with file and line",
        "unit/test_prompts.py::test_a_line_without_end_is_an_error_that_names_the_line",
    ),
    Kind(
        "prompts",
        "a file that vanished between planning and reading",
        "PromptSourceError with the file",
        "unit/test_prompts.py::test_a_file_that_vanished_is_an_error_that_names_it",
    ),
    Kind(
        "prompts",
        "a line that is no JSON",
        "rejected with its reason",
        "unit/test_prompts.py::test_what_is_not_json_is_a_bad_row",
    ),
    Kind(
        "prompts",
        "a row without a question, of an unknown role, with an image, with empty text",
        "rejected with its reason",
        "unit/test_prompts.py::test_a_bad_row_is_refused_with_its_reason",
    ),
    Kind(
        "prompts",
        "half of a surrogate pair in an id or a text",
        "rejected with its reason",
        "unit/test_plan.py::test_a_reason_that_utf8_cannot_hold_is_stored_with_escapes",
    ),
    Kind(
        "prompts",
        "a token id outside the vocabulary (it would kill the server)",
        "rejected with its reason",
        "unit/test_plan.py::test_a_bad_row_keeps_file_and_line_and_the_rest_goes_on",
    ),
    Kind(
        "prompts",
        "one id for two prompts",
        "rejected with its reason",
        "unit/test_plan.py::test_an_id_that_stands_twice_in_a_partition_is_a_bad_row_and_in_two_partitions_it_is_none",
    ),
    Kind(
        "prompts",
        "a template option that cuts or changes the ids",
        "rejected with its reason",
        "unit/test_rendering.py::test_template_options_that_would_change_what_is_rendered_are_refused",
    ),
    Kind(
        "prompts",
        "a chat template that refuses or breaks on a row",
        "rejected with its reason",
        "unit/test_rendering.py::test_a_template_that_breaks_on_a_row_costs_that_row",
    ),
    Kind(
        "prompts",
        "a prompt that was answered is changed or gone in the new plan",
        "RunError with examples",
        "unit/test_plan.py::test_a_plan_that_drops_what_was_answered_is_refused_with_an_example",
    ),
    Kind(
        "prompts",
        "an evaluation question among the training prompts",
        "set aside and counted",
        "unit/test_decontaminate.py::test_three_words_in_a_row_are_an_overlap_whatever_stands_between_them",
    ),
    Kind(
        "server",
        "another model, architecture or vocabulary",
        "Unfit with both names",
        "unit/test_probe.py::test_another_model_vocabulary_or_room_is_named",
    ),
    Kind(
        "server",
        "another tokenizer, or another chat of special tokens",
        "Unfit with both lists of ids",
        "unit/test_probe.py::test_another_tokenizer_is_caught_by_what_it_makes_of_a_text",
    ),
    Kind(
        "server",
        "a second BOS, swapped prompts, dropped, invented or filtered tokens, NaN, speculation",
        "Unfit before the first row",
        "unit/test_probe.py::test_a_server_that_alters_prompts_or_answers_is_caught",
    ),
    Kind(
        "server",
        "one special token filtered (`</think>`, a stop token)",
        "Unfit with the token",
        "unit/test_probe.py::test_a_server_that_filters_one_special_token_is_caught_with_that_token",
    ),
    Kind(
        "server",
        "a stop token that only the server knows",
        "Unfit with the token",
        "unit/test_probe.py::test_a_stop_token_of_the_server_alone_is_caught",
    ),
    Kind(
        "server",
        "servers of one run with other weights, precision or version",
        "Unfit with the field",
        "unit/test_probe.py::test_a_sibling_of_another_kind_is_named",
    ),
    Kind(
        "server",
        "new weights under a running job",
        "never stored; the server stays out",
        "unit/test_fleet.py::test_new_weights_under_a_running_job_are_never_stored_and_end_it",
    ),
    Kind(
        "server",
        "a server that comes back as another one",
        "it stays out",
        "unit/test_fleet.py::test_a_server_that_comes_back_as_another_stays_out",
    ),
    Kind(
        "server",
        "another model than the one that began the run",
        "FingerprintMismatch",
        "ray/test_generate_job.py::test_data_of_other_settings_is_refused_until_it_is_set_aside",
    ),
    Kind(
        "answers",
        "an answer to another request, another prompt echoed, a wrong count of tokens",
        "WrongAnswer, asked again",
        "unit/test_protocol.py::test_a_contradiction_is_refused_and_named",
    ),
    Kind(
        "answers",
        "an id outside the vocabulary, text or fractions for ids, no ids at all",
        "WrongAnswer, asked again",
        "unit/test_protocol.py::test_a_contradiction_is_refused_and_named",
    ),
    Kind(
        "answers",
        "tokens behind the stop token, a stop that is none, a length that was not reached",
        "WrongAnswer, asked again",
        "unit/test_protocol.py::test_a_contradiction_is_refused_and_named",
    ),
    Kind(
        "answers",
        "log-probabilities of other ids, above 0, NaN, or beyond what a row can hold",
        "WrongAnswer, asked again",
        "unit/test_protocol.py::test_a_contradiction_is_refused_and_named",
    ),
    Kind(
        "answers",
        "an abort with HTTP 200 and half an answer",
        "asked again",
        "unit/test_protocol.py::test_an_abort_is_worth_another_try_and_is_not_a_wrong_answer",
    ),
    Kind(
        "answers",
        "26 kinds of fault at once, each in 1.2% of the requests",
        "every stored row is right",
        "ray/test_generate_job.py::test_a_faulty_server_never_gets_a_wrong_row_stored",
    ),
    Kind(
        "answers",
        "an empty answer",
        "rejected with its reason",
        "unit/test_audit.py::test_an_answer_of_nothing_but_a_stop_is_empty",
    ),
    Kind(
        "answers",
        "a special token inside the answer",
        "rejected with token and place",
        "unit/test_audit.py::test_a_special_token_inside_an_answer_is_named_with_its_place",
    ),
    Kind(
        "answers",
        "an answer that ends in a loop",
        "rejected with its reason",
        "unit/test_audit.py::test_an_answer_that_ends_in_a_loop_is_not_fit",
    ),
    Kind(
        "answers",
        "`</think>` stripped from all answers of a partition",
        "the job stops",
        "unit/test_audit.py::test_a_partition_without_any_boundary_is_stopped_when_there_is_enough_evidence",
    ),
    Kind(
        "answers",
        "most answers of a partition unfit",
        "the job stops",
        "unit/test_audit.py::test_a_partition_with_more_than_half_of_its_answers_unfit_is_stopped",
    ),
    Kind(
        "tokens",
        "the first token stripped",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "a token dropped, repeated or replaced",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "an answer re-tokenised through text",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "an end token invented",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "tokens shuffled, or answers swapped",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "prompts swapped, or cut on the left or on the right",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "a second BOS, or the system message left out",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "an empty think block, or another token of the template",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "log-probabilities shifted, or of another answer",
        "set aside by capture: not what the target said",
        "unit/test_false_alarms.py::test_a_corrupt_answer_is_set_aside",
    ),
    Kind(
        "tokens",
        "answers of a sister checkpoint (1% noise in its weights, in bfloat16 2%)",
        "CaptureError for all together",
        "engine/test_capture_backends.py::test_answers_of_a_sister_checkpoint_are_found",
    ),
    Kind(
        "tokens",
        "recorded at another temperature",
        "set aside by capture",
        "unit/test_on_policy.py::test_a_temperature_that_was_not_the_recorded_one_shows",
    ),
    Kind(
        "generate",
        "a row file: flipped bits, cut, blocks blank or misplaced",
        "RunError with the file, or the row is left out and named, or set aside by capture",
        "unit/test_damaged_files.py::test_a_generated_row_reads_as_it_was_written_or_is_left_out_or_set_aside_by_capture",
    ),
    Kind(
        "generate",
        "a row whose tokens are not those of its hash",
        "left out and named",
        "unit/test_corpus.py::test_a_row_whose_ids_were_changed_is_left_out_and_named",
    ),
    Kind(
        "generate",
        "a row under another name, or with a log-probability too few",
        "left out and named",
        "unit/test_corpus.py::test_a_row_under_another_name_or_without_all_its_logprobs_is_left_out_and_named",
    ),
    Kind(
        "generate",
        "a line of the journal: flipped bits, cut, blank",
        "that answer is asked for again",
        "unit/test_damaged_files.py::test_an_answer_of_the_journal_is_the_one_that_was_written_or_none",
    ),
    Kind(
        "generate",
        "the record of committed units",
        "RunError with the file; a changed number asks for its row again, and the count of the rows finds it twice",
        "unit/test_damaged_files.py::test_damage_elsewhere_raises_nothing_but_named_errors",
    ),
    Kind(
        "generate",
        "rows of other settings in the run",
        "FingerprintMismatch with the field",
        "unit/test_runs.py::test_another_fingerprint_is_refused_field_by_field_and_changes_nothing",
    ),
    Kind(
        "generate",
        "two writers at once, or one that was left over",
        "RunBusy, or it writes nothing",
        "unit/test_runs.py::test_a_second_writer_is_refused_while_the_first_holds_the_run",
    ),
    Kind(
        "generate",
        "manifest.json, a summary, or a mark of success",
        "RunError with the file; a changed fingerprint is a FingerprintMismatch",
        "unit/test_damaged_files.py::test_damage_elsewhere_raises_nothing_but_named_errors",
    ),
    Kind(
        "plan",
        "plan.json: any value changed",
        "RunError: delete the plan, it is made again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "plan",
        "a file of units: flipped bits, cut, a column renamed",
        "RunError: delete the plan, it is made again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "corpus",
        "ids.bin",
        "RunError with the sequence: delete the corpus, it is made again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "corpus",
        "logprobs.bin, also NaN where a value was recorded",
        "RunError with the sequence: delete the corpus, it is made again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "corpus",
        "index.parquet: another boundary, length or partition",
        "RunError: delete the corpus, it is made again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "corpus",
        "corpus.json",
        "made again from the rows",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "states",
        "sequences of a batch swapped, one for all, rows shifted",
        "SelfCheckFailed before the first sequence",
        "unit/test_target_proof.py::test_states_that_were_mixed_up_are_found",
    ),
    Kind(
        "states",
        "rows missing by chunked prefill or a cache hit",
        "SelfCheckFailed before the first sequence",
        "unit/test_target_proof.py::test_states_that_were_mixed_up_are_found",
    ),
    Kind(
        "states",
        "a layer too few, one twice, or the last state for a layer",
        "SelfCheckFailed before the first sequence",
        "unit/test_target_proof.py::test_states_that_were_mixed_up_are_found",
    ),
    Kind(
        "states",
        "a layer off by one",
        "SelfCheckFailed: a second route finds other states",
        "unit/test_target_proof.py::test_each_layer_off_by_one_is_found",
    ),
    Kind(
        "states",
        "the state before the final norm",
        "SelfCheckFailed",
        "unit/test_target_proof.py::test_a_state_before_the_norm_is_found_without_a_second_route",
    ),
    Kind(
        "states",
        "the head of a sister model",
        "SelfCheckFailed",
        "unit/test_target_proof.py::test_the_head_of_a_sister_model_is_found",
    ),
    Kind(
        "states",
        "states of another sequence, shape or dtype, NaN",
        "CaptureError with the sequence",
        "unit/test_target_parts.py::test_states_of_another_sequence_or_shape_are_refused",
    ),
    Kind(
        "states",
        "other weights of the target than those that generated",
        "RunError with the hash",
        "ray/test_capture_job.py::test_a_target_with_other_weights_is_refused_before_anything_is_captured",
    ),
    Kind(
        "cache",
        "a shard: flipped bits, cut, blocks blank or misplaced",
        "DamagedShard with the file: remove it, it is captured again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "cache",
        "a shard that forgets or misnames a sequence",
        "DamagedShard; the next capture job makes it again",
        "unit/test_states_cache.py::test_a_shard_that_misnames_its_sequences_is_damaged",
    ),
    Kind(
        "cache",
        "states of tokens that were generated again",
        "DamagedShard",
        "unit/test_states_cache.py::test_states_of_other_tokens_are_refused",
    ),
    Kind(
        "cache",
        "a shard deleted after capture",
        "RunError before training",
        "unit/test_damaged_files.py::test_a_cache_that_lacks_a_file_does_not_train",
    ),
    Kind(
        "cache",
        "scores of a shard damaged or deleted",
        "the shard counts as missing; the next capture job makes it again",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "checkpoints",
        "state.pt or about.json: flipped bits, cut, blank",
        "passed over for the one before",
        "unit/test_damaged_files.py::test_a_damaged_checkpoint_is_passed_over_and_never_taken_for_another_step",
    ),
    Kind(
        "checkpoints",
        "a step number changed",
        "passed over for the one before",
        "unit/test_checkpoints.py::test_a_checkpoint_that_says_other_things_than_were_written_is_passed_over",
    ),
    Kind(
        "checkpoints",
        "a pickle that runs code",
        "RunError; the code does not run",
        "unit/test_security.py::test_a_checkpoint_of_a_run_whose_pickle_would_run_code_is_refused_and_runs_none",
    ),
    Kind(
        "checkpoints",
        "`best` leads out of the run",
        "passed over",
        "unit/test_security.py::test_the_best_checkpoint_is_one_of_the_run_wherever_its_link_leads",
    ),
    Kind(
        "checkpoints",
        "the log of the training",
        "the damaged line is left out",
        "unit/test_damaged_files.py::test_damage_elsewhere_raises_nothing_but_named_errors",
    ),
    Kind(
        "drafter",
        "a tensor missing, unknown, of another shape, NaN; d2t against t2d",
        "CheckpointError with the tensor",
        "unit/test_drafter_checkpoints.py::test_a_folder_that_would_serve_badly_is_refused_by_tensor",
    ),
    Kind(
        "drafter",
        "weights: flipped bits, cut, blocks blank or misplaced",
        "CheckpointError with the file",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "drafter",
        "config.json: any value changed after export",
        "CheckpointError with the field or the file",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "drafter",
        "config.json without RoPE, layers, or with another switch",
        "CheckpointError with the field",
        "unit/test_drafter_checkpoints.py::test_a_config_that_lost_a_field_is_refused",
    ),
    Kind(
        "drafter",
        "the sizes of the first drafter changed before the export",
        "CheckpointError with the file",
        "unit/test_damaged_files.py::test_a_damaged_file_is_named_or_reads_as_it_was_written",
    ),
    Kind(
        "drafter",
        "target ids where offsets belong",
        "ValueError with the remedy",
        "unit/test_drafter_vocabulary.py::test_target_ids_in_place_of_offsets_are_refused",
    ),
    Kind(
        "drafter",
        "a pickle that runs code",
        "CheckpointError; the code does not run",
        "unit/test_security.py::test_a_drafter_whose_pickle_would_run_code_is_refused_and_runs_none",
    ),
    Kind(
        "target",
        "config.json or weights damaged",
        "TargetError with the file; other values are another hash (RunError), or found by capture",
        "unit/test_damaged_files.py::test_damage_elsewhere_raises_nothing_but_named_errors",
    ),
    Kind(
        "evaluation",
        "counts of verify steps that contradict the answer",
        "WrongAnswer, asked again",
        "unit/test_acceptance_engine.py::test_counts_that_contradict_the_answer_are_a_wrong_answer",
    ),
    Kind(
        "evaluation",
        "answers to different prompts compared",
        "ValueError with both names",
        "unit/test_acceptance_engine.py::test_answers_to_different_prompts_are_not_compared",
    ),
    Kind(
        "evaluation",
        "an answer that the drafter changed",
        "a warning with token and place",
        "unit/test_acceptance_evaluate.py::test_another_answer_than_the_plain_engines_is_a_warning",
    ),
    Kind(
        "evaluation",
        "EAGLE for EAGLE3, another drafter or chain",
        "named as the cause",
        "unit/test_acceptance_diagnosis.py::test_a_server_of_another_drafter_or_chain_is_named_and_the_right_one_is_not",
    ),
    Kind(
        "evaluation",
        "a vocabulary map of absolute ids, or of other rows",
        "named as the cause",
        "unit/test_acceptance_diagnosis.py::test_a_map_that_holds_absolute_ids_is_named",
    ),
    Kind(
        "evaluation",
        "layers swapped, or named in another convention",
        "named as the cause",
        "unit/test_acceptance_diagnosis.py::test_swapped_layers_are_named_with_the_order_that_works",
    ),
    Kind(
        "evaluation",
        "norm_output flipped, rope_theta lost, fc missing",
        "named as the cause",
        "unit/test_acceptance_diagnosis.py::test_a_flipped_norm_output_is_named",
    ),
    Kind(
        "evaluation",
        "a drafter of another target",
        "named as the cause",
        "unit/test_acceptance_diagnosis.py::test_another_target_of_the_same_sizes_is_named",
    ),
    Kind(
        "evaluation",
        "a plain engine that speculates",
        "EngineFailed",
        "unit/test_acceptance_evaluate.py::test_a_plain_engine_that_speculates_is_refused",
    ),
)


def document() -> str:
    """docs/corruptions.md: the introduction, and a table a stage."""
    parts = [_INTRODUCTION]
    for stage in dict.fromkeys(kind.stage for kind in KINDS):
        rows = [f"| {kind.what} | {kind.caught} | {_named(kind.test)} |" for kind in KINDS if kind.stage == stage]
        parts.append(
            "\n".join([f"## {stage.capitalize()}", "", "| what | caught | test |", "| --- | --- | --- |", *rows, ""])
        )
    return "\n".join(parts)


def _named(test: str) -> str:
    path, _, name = test.partition("::")
    return f"{name.removeprefix('test_').replace('_', ' ')} (`tests/{path}`)"


def exists(test: str) -> bool:
    """Whether there is such a test."""
    path, _, name = test.partition("::")
    file = TESTS / path
    return file.exists() and re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE) is not None


if __name__ == "__main__":
    DOCUMENT.write_text(document())
