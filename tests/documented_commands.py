"""How the tests run the commands of the documentation; ``test_documented_commands.py`` runs those named nowhere here.

The keys are patterns of ``fnmatch`` for a command, or for ``page: command``.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from documents import Command

# The test that runs the command. Its time is listed at the end of `scripts/test --all`.
ELSEWHERE = {
    "scripts/demo": "tests/test_examples.py::test_the_demo_learns_the_digits",
    "accel launch *--mixed_precision bf16 examples/digits.py": (
        "tests/test_examples.py::test_the_demo_learns_the_digits"
    ),
    "accel launch * --ft * examples/elastic.py*": "tests/test_elastic_example.py",
    "accel launch --cpu --num_processes 2 examples/digits.py": "tests/test_examples.py",
    "accel launch * examples/complete_*_example.py": "tests/test_feature_examples.py",
    "accel launch * examples/by_feature/gradient_accumulation.py": "tests/test_feature_examples.py",
    "accel launch * examples/by_feature/tensor_parallel.py": "tests/test_feature_examples.py",
    "accel launch * examples/muon.py": "tests/test_feature_examples.py",
    "accel launch * examples/packed_long_context.py": "tests/test_feature_examples.py",
    "accel launch * examples/qlora.py": "tests/test_feature_examples.py",
    "accel launch * examples/resume.py*": "tests/test_resume_example.py",
    "accel launch * --num_machines 2:8 *examples/world_size.py*": "tests/test_machines_come_and_go.py",
    "*examples/world_size.py*": "tests/test_world_size_example.py",
    "accel launch --config_file examples/fsdp_configs/* examples/fsdp.py": "tests/test_fsdp_example.py",
    "accel launch * examples/deepspeed_models.py *": "tests/test_deepspeed_example.py",
    "accel launch --config_file config.yaml *test.py": "packages/accel/tests/test_deepspeed_plugin.py",
    "accel launch * examples/megatron_gpt.py*": "tests/test_megatron_example.py",
    "python examples/big_model.py --checkpoint out": "tests/test_megatron_example.py",
    "accel megatron convert *": "packages/accel-megatron/tests/test_convert.py",
    "accel megatron data *": "packages/accel-megatron/tests/test_data.py",
    "docs/guides/planning.md: accel plan *": "packages/accel-plan/tests/test_plan.py",
    "README.md: accel plan *": "packages/accel-plan/tests/test_plan.py::test_the_readme_shows_what_the_command_prints",
    "docs/guides/choosing-a-strategy.md: accel plan [!-]*": "packages/accel-plan/tests/test_strategy_page.py",
    "packages/accel-plan/README.md: accel plan *": "packages/accel-plan/tests/test_plan.py",
    "accel plan tp4_pp2.yaml *": "packages/accel-megatron/tests/test_planning.py",
    "accel estimate-memory bert-base-cased*": "packages/accel-bigmodel/tests/test_estimate.py",
    "accel to-fsdp2 *": "packages/accel/tests/test_to_fsdp2.py",
    "accel merge-weights * --adapter *": "packages/accel/tests/test_merge_adapter.py",
    "accel merge-weights *": "packages/accel/tests/test_fsdp_checkpoints.py",
    "accel test --device simgpu *": "tests/device/test_accel.py::test_the_device_is_checked_and_reported",
    "accel test": "packages/accel/tests/test_self_test.py",
    "accel config": "packages/accel-launch/tests/test_questionnaire.py",
    "accel config update": "packages/accel-launch/tests/test_config_command.py",
    "accel doctor": "packages/accel-launch/tests/test_doctor.py::test_this_machine_works",
    "accel doctor --cpu --num_processes 2": "packages/accel-launch/tests/test_doctor.py::test_this_machine_works",
    "accel doctor --cpu --num_machines 2 *": "tests/test_launch_hosts.py::test_the_doctor_passes_on_both_hosts",
    "mpirun *": "tests/test_launch_mpi.py::test_mpirun_starts_accel_launch",
    "accel launch * --mpirun_hostfile *": "tests/test_launch_mpi.py::test_accel_launch_starts_mpirun",
    "srun *": "tests/test_launch_slurm.py::test_a_signal_ends_the_ranks_of_all_nodes",
    "python examples/quantize.py": "tests/test_model_examples.py::test_quantize",
    "PJRT_DEVICE=CPU *python examples/xla.py*": "tests/test_xla_launch.py::test_the_example",
    "PJRT_DEVICE=* python show.py*": "tests/test_xla_launch.py",
    "accel launch --tpu --main_training_function *": (
        "packages/accel-launch/tests/test_tpu.py::test_every_chip_calls_the_function"
    ),
    "accel tpu-config --tpu_name *": "packages/accel-launch/tests/test_tpu.py::TestTpuConfig",
    "accel launch * examples/tracking.py *": "tests/test_tracking_example.py",
    "accel launch * --monitor examples/digits.py*": "packages/accel-monitor/tests/test_accelerator.py",
    "accel launch * --monitor_port *": "packages/accel-monitor/tests/test_accelerator.py",
    "accel monitor *": "packages/accel-monitor/tests/test_page.py",
    "accel goodput*": "packages/accel-monitor/tests/test_ledger.py",
    "accel track show * --html *": "packages/accel-track/tests/test_viewer_page.py",
    "accel track show * --png *": "packages/accel-track/tests/test_viewer.py",
    "accel track show * --run *": "packages/accel-track/tests/test_viewer.py",
}
# Commands that `accel launch` only checks and prints (--dry_run): they need hardware or machines.
DRY_RUN = {
    "accel launch --num_machines 2 *": "needs two machines; tests/test_launch_hosts.py has two",
    "accel launch --num_machines 2:8 *": "needs machines; tests/test_machines_come_and_go.py has hosts",
    "accel launch --nnodes 2 *": "as above",
    "accel launch * --deepspeed_hostfile *": "needs two machines; tests/test_launch_deepspeed.py has two",
    "accel launch --tpu *": "needs a TPU",
    "accel launch *--config_file sagemaker.yaml *": "creates a job of AWS; tests/test_launch_sagemaker.py has its SDK",
    "accel launch *--use_megatron_lm *": "needs Megatron-core; scripts/test-megatron has it",
    "accel launch --ft *": "its replicas need a script that trains; tests/test_elastic_example.py has one",
}
# Commands that no test runs, and why.
NOT_RUN = {
    "pip install torch --*": "another package index",
    "pip install torch": "the environment of the tests has it; another build would replace it",
    "pip install torch 'accel>=1.0'": "as above",
    "pip install sagemaker": "the library of another service",
    "pip install $(ls *": "scripts/_env.sh installs the packages like this",
    "conda *": "another package manager",
    "accel launch --gpu_ids *": "needs four GPUs",
    "python benchmarks/kill_replicas.py *": "takes from ten minutes to an hour",
    "python benchmarks/stragglers.py *": "takes half an hour",
    "python benchmarks/machines_come_and_go.py*": "takes 5 to 15 minutes; tests/test_machines_come_and_go.py does not",
    "numactl *": "needs a machine with two sockets",
    "python -m venv ../accel-env": "scripts/_env.sh makes an environment like this",
    "source ../accel-env/bin/activate": "belongs to the command above it",
    "cd accel": "the directory of a clone",
    "accel plan --auto --model llama-3-70b --num_processes 64 *": "three minutes; planning.md has a search that is run",
    ".ci/run": "runs these tests",
    "scripts/*": "these run the tests, the documentation and the benchmarks themselves",
    "#!/bin/bash": "begins a batch script; tests/test_launch_slurm.py submits some",
    "docs/guides/checkpoints.md: status=$[?]": "as above",
    "docs/guides/checkpoints.md: if *": "as above",
    "docs/guides/checkpoints.md: exit $status": "as above",
}


def entry(table: dict[str, str], command: Command) -> str | None:
    """The value of the first pattern that fits a command."""
    names = command.line, f"{command.block.page}: {command.line}"
    return next((value for key, value in table.items() if any(fnmatchcase(name, key) for name in names)), None)
