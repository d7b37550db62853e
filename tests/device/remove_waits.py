"""Removes each synchronisation, ``record_stream``, wait and blocking flag in turn, and prints which tests notice.

    python tests/device/remove_waits.py                  all places
    python tests/device/remove_waits.py staging          those whose path contains a word
    python tests/device/remove_waits.py --table FILE     keep the rows in a file, and leave out those that are in it

It changes a copy of the sources, which the tests import instead of those of this checkout. Barriers between ranks, and
waits for processes, are not among them. Exit status 1: no test noticed one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What orders work, and what it becomes.
CHANGES = {
    # A statement that does nothing else.
    r"^(\s*)[\w.\[\]]+(?:\([^()]*\))?\.(?:synchronize|record_stream|wait_event|wait_stream|record)\(.*\)$": r"\1pass",
    r"^(\s*)(?:operation|request|work|self\._work)\.wait\(\)$": r"\1pass",
    # A call whose result is waited for at once.
    r"^(\s*call\(\))\.wait\(\)$": r"\1",
    # A wait for a thread that writes a state, logs values or copies output.
    r"^(\s*)(?:self|running|save|queue|thread|self\._thread)\.(?:wait|join)\(\)$": r"\1pass",
    # A copy to the host without ``non_blocking`` is a synchronisation of its own.
    r"\.cpu\(\)|\.to\(\"cpu\"(, copy=True)?\)": r'.to("cpu", non_blocking=True\1)',
    r"(send_to_device\(.*), \"cpu\"\)": r'\1, "cpu", non_blocking=True)',
    r"(\.to\(.*, non_blocking=)non_blocking\)": r"\1True)",
    # Without these the host waits for each copy.
    r"^((?!.*\bdef ).*), non_blocking=[\w.]+": r"\1",
    r"^(\s*_?non_blocking=)[\w.]+,$": r"\1False,",
    r"(^\s+|, )(?:self\._)?non_blocking(?=[,)])": r"\1False",
}
# Part of a place and its line, or of what it becomes -> why no test on this device can notice it.
EXCUSED = {
    "accel_launch/doctor/ranks.py: torch.accelerator.synchronize()": "measures time",
    "accel_megatron/": "Megatron-core is written for one vendor's GPUs",
    "accel_state/devices/tpu.py": "a TPU's",
    "accel_checkpoint/staging.py: without_storage": "only for tensors without memory of their own, as XLA's are",
    "accel_fp8/delayed_scaling.py": "a method of the same name that averages scales; packages/accel-fp8/tests notice",
    "accel/precision/fp8.py": "calls that method",
    "accel_bigmodel/hooks/casting.py": "converts weights where they are, and torch waits for no conversion",
}
UNNOTICED = "NOTHING"
COPIES, STREAMING = "tests/device/test_host_copies.py", "tests/device/test_streaming.py"
ACCEL, WORLDS = "tests/device/test_accel.py", "tests/device/test_worlds.py::test_trains_as_one_process"
SYNCS = "tests/device/test_syncs.py"
CHECK = [f"{SYNCS}::test_the_check_of_a_device_does_not_wait_for_its_copies"]
SENT = [f"{SYNCS}::test_tensors_are_sent_without_waiting_if_asked"]
BACKGROUND = "packages/accel/tests/test_checkpoint_background.py"
API = "packages/accel-checkpoint/tests/test_api.py"
AHEAD = ["packages/accel-bigmodel/tests/test_accelerators.py::test_a_host_that_is_ahead_does_not_copy_the_whole_model"]
PIPELINED = ["packages/accel-bigmodel/tests/test_inference.py::test_a_custom_model"]


def _copied(name: str) -> list[str]:
    return [f"{COPIES}::test_the_copy_is_complete[{name}]"]


# Part of a place and its line, or of what it becomes -> the tests that should notice it; the first entry counts.
TESTS = {
    "accel/checkpointer/": [f"{BACKGROUND}::test_one_is_under_way_at_a_time"],
    "accel/fault_tolerance/transport.py": _copied("state_for_another_replica"),
    "accel/fault_tolerance/run_state.py": [
        f"{STREAMING}::test_a_state_for_another_replica_is_that_of_the_loops_stream"
    ],
    "accel/fault_tolerance/": [
        "packages/accel/tests/test_fault_tolerance.py::test_gradients_have_the_same_bits_on_any_number_of_replicas"
    ],
    "accel/fsdp/activation_offload.py": ["tests/device/test_activation_offload.py"],
    "accel/fsdp/": [f"{COPIES}::test_a_gathered_tensor_where_files_without_names_cannot_be_opened"],
    "accel/functions/fsdp2.py": _copied("weights_of_a_model_in_host_memory"),
    "accel/parallel/documents.py": [f"{COPIES}::test_documents_are_split_by_their_lengths"],
    "accel/parallel/expert_balance.py": _copied("load_of_experts"),
    "accel/parallel/late_checks.py": [SYNCS],
    "accel/parallel/pipeline.py": [f"{WORLDS}[pp tied]"],
    "accel/self_test/device_checks.py": CHECK,
    "accel/self_test/": [f"{ACCEL}::test_the_device_is_checked_and_reported"],
    "accel/strategies/first_calls.py": [f"{COPIES}::test_the_digest_of_a_batch_is_that_of_its_values"],
    "accel/strategies/mesh.py": [f"{WORLDS}[tp]"],
    "accel/strategies/mesh_pp.py": [f"{WORLDS}[pp]"],
    "accel_bigmodel/dispatch.py": _copied("offloaded_weights"),
    "accel_bigmodel/hooks/align.py": _copied("weights_of_a_hook"),
    "accel_bigmodel/hooks/state_dicts.py: value = ": _copied("state_dict"),
    "accel_bigmodel/hooks/state_dicts.py": _copied("offloaded_state_dict"),
    "accel_bigmodel/offload/experts.py": [f"{SYNCS}::test_experts_in_host_memory_are_read_without_waiting"],
    "accel_bigmodel/offload/store.py": _copied("offloaded_file"),
    "accel_bigmodel/offload/prefetch.py": AHEAD,
    "accel_bigmodel/offload/staging.py: earlier.": AHEAD,
    "accel_bigmodel/offload/staging.py": [STREAMING, f"{SYNCS}::test_an_offloaded_forward"],
    "-> new: Any = source.detach().to(target, non_blocking=True)": _copied("weight_moved_to_the_host"),
    "accel_bigmodel/tensors.py": SENT,
    "accel_bigmodel/pipeline/": PIPELINED,
    "accel_checkpoint/validation.py": _copied("state_before_a_load"),
    "accel_checkpoint/api.py": [
        f"{API}::test_a_save_in_the_background_has_the_values_of_its_call",
        f"{API}::test_the_error_of_a_save_in_the_background_is_raised",
    ],
    "accel_checkpoint/manifest.py": [
        "packages/accel-checkpoint/tests/test_manifest.py::test_no_job_is_started_after_an_error"
    ],
    "accel_checkpoint/writer.py": [f"{API}::test_a_save_in_the_background_has_the_values_of_its_call"],
    "accel_checkpoint/staging.py": [
        f"{ACCEL}::{name}" for name in ("test_a_state_saved_in_the_background_is_copied_to_the_host", "test_load_state")
    ],
    "accel_data/": [f"{SYNCS}::test_batches_are_copied_without_waiting_if_asked"],
    "accel_launch/elastic/output.py": [
        "packages/accel-launch/tests/test_elastic.py::test_the_last_line_of_output_is_not_lost"
    ],
    "accel_launch/doctor/": [f"{ACCEL}::test_commands_that_describe_the_machine[doctor]"],
    "accel_monitor/device_times.py": [
        "tests/device/test_monitor.py::test_a_devices_events_divide_the_steps_and_nothing_waits"
    ],
    "accel_monitor/": [f"{STREAMING}::test_losses_that_the_monitor_looks_at_are_those_of_their_step"],
    "accel_quant/loading.py": [f"{COPIES}::test_a_weight_that_is_quantized_on_the_device_is_complete_on_the_disk"],
    "accel_quant/": [f"{COPIES}::test_a_weight_is_quantized_on_the_cpu_when_it_has_arrived_there"],
    "-> return item.to(device, non_blocking=True)": [f"{COPIES}::test_the_copy_is_complete"],
    "accel_state/operations/nested.py": SENT,
    "accel_state/safetensors_writer.py": _copied("safetensors"),
    "accel_state/collectives/": ["packages/accel-state/tests/test_collectives.py::test_collectives[2]"],
    "accel_state/devices/": CHECK,
    "accel_track/tracking.py": ["packages/accel-track/tests/test_tracking.py"],
    "accel_track/": [f"{STREAMING}::test_logged_values_are_those_of_their_step"],
}


@dataclass
class Place:
    """A line that orders work, and what it becomes."""

    path: Path
    number: int  # from 0
    replacement: str

    @property
    def name(self) -> str:
        return f"{self.path.as_posix().split('/src/', 1)[1]}:{self.number + 1}"

    @property
    def line(self) -> str:
        return self.path.read_text(encoding="utf-8").splitlines()[self.number].strip()

    @property
    def row(self) -> str:
        """The beginning of its row in the table."""
        return f"| {self.name} | `{self.line}` | `{self.replacement.strip()}` |"

    @property
    def excuse(self) -> str | None:
        return next((why for part, why in EXCUSED.items() if self._is(part)), None)

    @property
    def tests(self) -> list[str]:
        found = [tests for part, tests in TESTS.items() if self._is(part)]
        if not found:
            sys.exit(f"TESTS names no test that should notice {self.name}.")
        return found[0]

    def _is(self, part: str) -> bool:
        return part in f"{self.name.partition(':')[0]}: {self.line} -> {self.replacement.strip()}"


def places() -> list[Place]:
    """Every place in the packages."""
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            for pattern, replacement in CHANGES.items():
                changed = re.sub(pattern, replacement, line)
                if changed != line:
                    found.append(Place(path, number, changed))
    return found


class Copy:
    """A copy of the packages' sources, of which one line at a time is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for source in sorted(ROOT.glob("packages/*/src")):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / source.relative_to(ROOT), ignore=ignored)
        copies = map(str, sorted(folder.glob("packages/*/src")))
        self._variables = {**os.environ, "ACCEL_TEST_DEVICE": "simgpu", "OMP_NUM_THREADS": "1"}
        self._variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "device"), *copies])

    def failing(self, tests: list[str]) -> str:
        """The first of some tests that fails; empty if all pass."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "--all",
            "-p",
            "device_plugin",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        done = subprocess.run(command, cwd=ROOT, env=self._variables, capture_output=True, text=True, check=False)
        noticed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
        return ", ".join(dict.fromkeys(noticed)) or (f"pytest ended with {done.returncode}" if done.returncode else "")

    def failing_without(self, place: Place) -> str:
        """The first of a place's tests that fails with its line replaced; empty if all pass."""
        copied = self._folder / place.path.relative_to(ROOT)
        original = copied.read_text(encoding="utf-8")
        lines = original.splitlines(keepends=True)
        lines[place.number] = place.replacement + "\n"
        copied.write_text("".join(lines), encoding="utf-8")
        try:
            return self.failing(place.tests)
        finally:
            copied.write_text(original, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the places to change; all without one")
    parser.add_argument(
        "--table", type=Path, help="a file that keeps the rows; places that it has are not changed again"
    )
    arguments = parser.parse_args()
    rows = arguments.table.read_text().splitlines() if arguments.table and arguments.table.exists() else []
    chosen = [
        place
        for place in places()
        if (not arguments.words or any(word in place.name for word in arguments.words))
        and not any(row.startswith(place.row) for row in rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        tests = sorted({test for place in chosen if not place.excuse for test in place.tests})
        if tests and (failed := copy.failing(tests)):
            sys.exit(f"{failed} fails without a change. Repair it first.")
        for place in chosen:
            result = f"not run: {place.excuse}" if place.excuse else copy.failing_without(place) or UNNOTICED
            rows.append(f"{place.row} {result} |")
            print(rows[-1], flush=True)
            if arguments.table:
                arguments.table.write_text("\n".join(rows) + "\n")
    print("\n| place | line | becomes | noticed by |\n| --- | --- | --- | --- |", *sorted(rows), sep="\n")
    return 1 if any(UNNOTICED in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
