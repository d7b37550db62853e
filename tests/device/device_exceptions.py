"""Tests that do not run with a device in the place of the CPU, or end with a refusal there, and why."""

from __future__ import annotations

import os

_CPU_BITS = "compares bits with what the CPU computes, which adds in another order"

_BELOW_ROUNDING = "finds by a difference that is smaller than what the comparison with a CPU allows"
_NCCL = "communicates tensors of the CPU itself, which NCCL does not send"
_TORCHAO = "on a GPU, torchao is chosen if it is installed"
_SIMULATED = os.environ.get("ACCEL_TEST_DEVICE") == "simgpu"

_NO_ACCELERATOR = "states what holds on a machine without accelerators"
_PLAN = "accel plan computes without memory, on the CPU of any machine"
_COMPILER = "torch compiles no code for the simulated GPU"

# Part of a test's id -> why it is skipped.
SKIPPED: dict[str, str] = {
    "test_reading_paths.py": "counts the calls of a run on the CPU",
    "test_readmes.py::test_the_examples_print_what_the_readme_says[accel-quant": "the outputs are those of a CPU",
    "test_accelerators.py::test_the_next_weights_arrive_while": "times copies and products of a real device",
    "packages/accel-plan/": _PLAN,
    "test_device_maps.py::test_a_map_that_does_not_fit_the_model_is_refused": _NO_ACCELERATOR,
    "test_tensors.py::test_moving_tensors": _NO_ACCELERATOR,
    "test_loading.py::test_every_form_of_checkpoint_gives_the_same_model": _NO_ACCELERATOR,
    "test_prepare.py::test_batches_are_moved_only_if_asked": _NO_ACCELERATOR,
    "test_devices.py::test_the_cpu_is_the_last_resort": _NO_ACCELERATOR,
    "test_devices.py::test_the_base_class_drives_a_plug_in": "the process has another plug-in already",
    "test_devices.py::test_a_plug_in_that_cannot_be_loaded": "the process has another plug-in already",
    "test_state.py::test_instances_share_their_attributes": _NO_ACCELERATOR,
    "test_state.py::test_the_strategy_shows_in_the_words": _NO_ACCELERATOR,
    "test_state.py::test_functions_run_on_the_chosen_process_only": _NO_ACCELERATOR,
    "test_facade.py::test_what_an_accelerator_says_of_itself": _NO_ACCELERATOR,
    "test_training.py::test_settings_that_contradict_each_other_are_refused": _NO_ACCELERATOR,
    "test_fp8.py::test_a_back_end_that_cannot_compute_here": _NO_ACCELERATOR,
    "test_fp8.py::test_the_log_says_which_back_end_and_why": _NO_ACCELERATOR,
    "test_mesh_groups.py::test_a_mesh_creates_the_process_group_of_the_launcher": _NO_ACCELERATOR,
    "::test_missing_resources_are_reported": _NO_ACCELERATOR,
    "test_self_test.py::test_a_device_is_checked_and_reported": _NO_ACCELERATOR,
    **dict.fromkeys(
        (
            "accel-quant/tests/test_loading.py::test_what_is_on_the_disk_is_quantized",
            "accel-quant/tests/test_loading.py::test_a_quantized_checkpoint_is_read_in_place",
            "accel-quant/tests/test_loading.py::test_a_map_is_found_from_the_quantized_sizes",
        ),
        "compares to the last bit with a map that computes on the CPU, where bitsandbytes has other kernels",
    ),
    "test_attach.py::test_a_forked_process_leaves": "torch runs no backward pass in a fork of a process with a device",
    "test_refused_combinations.py": "refuses what only the CPU, and what DeepSpeed on the CPU, cannot compute",
}
_SKIPPED_IF_SIMULATED: dict[str, str] = {
    "test_accelerator.py::test_a_rank_that_waits_for_another": "the simulated GPU computes at once, in the host's time",
    "compiled": _COMPILER,
    "accel-fp8/tests/test_compile.py": _COMPILER,
    "test_saving.py::test_wrapping_and_compiling": _COMPILER,
    "test_training.py::test_a_model_in_half_precision_can_be_exported": _COMPILER,
}
_SKIPPED_ON_A_GPU: dict[str, str] = {
    "test_training.py::test_clipping_in_one_process_equals_plain_pytorch": _CPU_BITS,
    "accel-quant/tests/test_loading.py::test_an_offloaded_model_is_saved_whole": _CPU_BITS,
    "test_training.py::test_a_model_in_half_precision_can_be_exported": "gives torch.export inputs on the CPU",
    "accel/tests/test_fp8.py::test_a_model_trains_in_8_bits[None-native": _TORCHAO,
    "accel/tests/test_fp8.py::test_prepared_twice_copied_and_unwrapped": _TORCHAO,
    "accel/tests/test_fp8.py::test_evaluation_and_autocast": _TORCHAO,
    "test_training.py::test_communication_hooks_compress_and_still_train[bf16-no": _BELOW_ROUNDING,
    "test_training.py::test_communication_hooks_compress_and_still_train[no-bf16": _BELOW_ROUNDING,
    "test_mesh_tp_sequence.py::test_dropout_between_layers": "one process draws on the CPU, whose generator is another",
    "test_training.py::test_a_model_that_outlives_its_process_group": _NCCL,
    "test_mesh_context.py::test_attention_over_shared_sequences": _NCCL,
    "test_mesh_context.py::test_what_would_be_computed_wrongly": _NCCL,
    "test_mesh_loss.py::test_losses_on_shards": _NCCL,
    "test_sharded_loading.py::test_every_rank_gets_its_shards": _NCCL,
    "test_sharded_specs.py::test_bytes_read_are_those_needed": _NCCL,
    "test_sharded_specs.py::test_metadata_is_that_of_torch": _NCCL,
    "accel-checkpoint/tests/test_api.py::test_sharded_tensors_are_refused": _NCCL,
    "accel-fp8/tests/test_distributed.py::test_two_ranks_train_as_one_process_does": _NCCL,
}

# Part of a test's id -> words of the error that it must end with.
REFUSED: dict[str, str] = {
    "test_debug.py::test_mismatches_raise_on_every_rank": "got tensors on cpu, but this process communicates through",
}
_REFUSED_IF_SIMULATED: dict[str, str] = {
    "test_training.py::test_communication_hooks_compress_and_still_train[bf16-no": "BF16 all reduce communication hook",
    "test_training.py::test_communication_hooks_compress_and_still_train[no-bf16": "BF16 all reduce communication hook",
    **dict.fromkeys(
        (
            "test_deepspeed_config_launch.py::test_the_accelerator_follows_the_configuration",
            "test_deepspeed_training.py::test_bad_input",
            "test_deepspeed_training.py::test_errors_of_operator_builds",
            "test_deepspeed_training.py::test_windows[2]",
            "test_deepspeed_checkpoints.py::test_open_accumulation_windows_are_not_saved",
            "test_deepspeed_models.py::test_expert_layers_and_models_created_sharded",
            "test_deepspeed_models.py::test_student_and_sharded_teacher",
        ),
        "deepspeed was imported before the Accelerator and uses cpu, but this process runs on simgpu",
    ),
}


def reason_to_skip(nodeid: str) -> str | None:
    """Why a test does not run with the device; None if it does."""
    skipped = SKIPPED | (_SKIPPED_IF_SIMULATED if _SIMULATED else _SKIPPED_ON_A_GPU)
    return next((reason for part, reason in skipped.items() if part in nodeid), None)


def refusal(nodeid: str) -> str | None:
    """Words of the error that a test must end with on the device; None if it must pass."""
    refused = REFUSED | (_REFUSED_IF_SIMULATED if _SIMULATED else {})
    return next((words for part, words in refused.items() if part in nodeid), None)
