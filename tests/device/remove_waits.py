"""Removes each synchronisation, ``record_stream`` and wait in the packages in turn, and prints which tests notice.

    python tests/device/remove_waits.py                  all places
    python tests/device/remove_waits.py staging          those whose path contains a word

It changes a copy of the sources, which the tests import instead of those of this checkout. Exit status 1: no test
noticed one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A statement that only orders work, and what stays in its place.
STATEMENT = re.compile(
    r"^(\s*)[\w.\[\]]+(?:\([^()]*\))?\.(?:synchronize|record_stream|wait_event|wait_stream|record)\(.*\)$|"
    r"^(\s*)(?:operation|work|self\._work)\.wait\(\)$"
)
# A call whose result is waited for at once.
WAITED = re.compile(r"^(\s*call\(\))\.wait\(\)$")
# A wait for a thread that writes a state.
THREAD = re.compile(r"^(\s*)(?:self|running|save)\.wait\(\)$")
# A copy to the host without ``non_blocking`` is a synchronisation of its own. Copies that may be late already are
# ordered by the places above, so that removing their flag is no error.
BLOCKING = re.compile(r"\.cpu\(\)|\.to\(\"cpu\"(, copy=True)?\)")
LATE = r'.to("cpu", non_blocking=True\1)'
# Part of a place and its line -> why no test on this device can notice it.
EXCUSED = {
    "accel_launch/doctor/": "measures time",
    "accel_megatron/": "Megatron-core is written for one vendor's GPUs",
    "accel/self_test/": "is a test itself",
    "accel_state/devices/": "the implementation of Device.synchronize",
    "accel_checkpoint/staging.py: without_storage": "only for tensors without memory of their own, as XLA's are",
    "accel_fp8/delayed_scaling.py": "a method of the same name that averages scales; packages/accel-fp8/tests notice",
    "accel/precision/fp8.py": "calls that method",
}
COPIES, STREAMING = "tests/device/test_host_copies.py", "tests/device/test_streaming.py"
SAVES = [
    f"tests/device/test_accel.py::{name}"
    for name in ("test_a_state_saved_in_the_background_is_copied_to_the_host", "test_load_state")
]
# The first entry whose name is part of a place's.
TESTS = {
    "accel_bigmodel/offload/store.py": [COPIES],
    "accel_bigmodel/offload/": [STREAMING, "packages/accel-bigmodel/tests/test_accelerators.py"],
    "accel_bigmodel/pipeline/": ["packages/accel-bigmodel/tests/test_inference.py"],
    "accel_bigmodel/": [COPIES],
    "accel_track/": [STREAMING],
    "accel_monitor/": [STREAMING],
    "accel_quant/": ["packages/accel-quant/tests/test_loading.py"],
    "accel_state/": [COPIES],
    "accel_checkpoint/validation.py": [COPIES],
    "accel_checkpoint/api.py": ["packages/accel-checkpoint/tests/test_api.py"],
    "accel_checkpoint/": SAVES,
    "accel/checkpointer/": ["packages/accel/tests/test_checkpoint_background.py"],
    "accel/fault_tolerance/transport.py": [COPIES],
    "accel/fault_tolerance/": ["packages/accel/tests/test_fault_tolerance.py"],
    "accel/parallel/expert_balance.py": ["packages/accel/tests/test_expert_states.py"],
    "accel/parallel/late_checks.py": ["tests/device/test_syncs.py"],
    # Among others with tied weights. Without the wait, messages meet in another order, and the test reaches its limit.
    "accel/parallel/": ["packages/accel/tests/test_mesh_pipeline.py::test_two_stages_train_as_one_process_does"],
    "accel/strategies/mesh.py": ["tests/device/test_worlds.py::test_trains_as_one_process[tp]"],
    "accel/strategies/mesh_pp.py": [
        "packages/accel/tests/test_mesh_pipeline.py::test_two_stages_train_as_one_process_does"
    ],
    "accel/": [COPIES],
}


def places() -> list[tuple[Path, int, str]]:
    """Every place: file, line number from 0, and what the line becomes."""
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            statement, waited = STATEMENT.match(line) or THREAD.match(line), WAITED.match(line)
            if statement:
                found.append((path, number, f"{line[: len(line) - len(line.lstrip())]}pass"))
            elif waited:
                found.append((path, number, waited[1]))
            elif BLOCKING.search(line):
                found.append((path, number, BLOCKING.sub(LATE, line)))
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
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "device_plugin", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, env=self._variables, capture_output=True, text=True, check=False)
        noticed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
        return ", ".join(dict.fromkeys(noticed)) or (f"pytest ended with {done.returncode}" if done.returncode else "")

    def failing_without(self, path: Path, number: int, replacement: str, tests: list[str]) -> str:
        """The first of some tests that fails with a line replaced; empty if all pass."""
        copied = self._folder / path.relative_to(ROOT)
        original = copied.read_text(encoding="utf-8")
        lines = original.splitlines(keepends=True)
        lines[number] = replacement + "\n"
        copied.write_text("".join(lines), encoding="utf-8")
        try:
            return self.failing(tests)
        finally:
            copied.write_text(original, encoding="utf-8")


def main() -> int:
    words = sys.argv[1:]
    unnoticed, passing = 0, set()
    print("| place | line | noticed by |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for path, number, replacement in places():
            name = path.as_posix().split("/src/", 1)[1]
            if words and not any(word in f"{name}:{number + 1}" for word in words):
                continue
            line = path.read_text(encoding="utf-8").splitlines()[number].strip()
            excuse = next((why for part, why in EXCUSED.items() if part in f"{name}: {line}"), None)
            tests = next((files for part, files in TESTS.items() if part in name), ["tests/device"])
            if not excuse and " ".join(tests) not in passing:
                if failed := copy.failing(tests):
                    sys.exit(f"{tests} fail without a change: {failed}. Repair them first.")
                passing.add(" ".join(tests))
            result = f"not run: {excuse}" if excuse else copy.failing_without(path, number, replacement, tests)
            unnoticed += not result
            print(f"| {name}:{number + 1} | `{line}` | {result or 'NOTHING'} |", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
