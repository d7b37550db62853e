"""Run pytest, and then run the tests that failed once more, alone.

    python scripts/pytest_retry.py [ARGUMENTS OF PYTEST]

The failed tests run again one after another in one process, next to no other worker. A test that fails again fails the
run. A test that passes does not: it is listed at the end under "passed when run alone", with its first failure in full.
More than MOST of these fail the run, since that many at once are no accident.

ACCEL_PASSED_ALONE names a file that collects the listed tests of several runs. The caller counts and prints them:

    python scripts/pytest_retry.py --passed-alone FILE
    python scripts/pytest_retry.py --add NAME LOG         add something else that failed first, with its output
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# How many tests of a whole run may pass only when they run alone.
MOST = 5
# With more failures than these, the change is wrong: running them again would only take time.
MOST_TRIED = 20
_FAILED_TESTS = 1  # pytest's exit code; others are errors of usage, collection or the interpreter


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments and return the exit code."""
    if arguments[:1] == ["--passed-alone"]:
        return summarize(Path(arguments[1]))
    if arguments[:1] == ["--add"]:
        add(Path(os.environ["ACCEL_PASSED_ALONE"]), {arguments[1]: Path(arguments[2]).read_text(encoding="utf-8")})
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cache = ["-o", f"cache_dir={folder}/cache"]
        code, first = run([*arguments, *cache], Path(folder, "first.json"))
        failed = first["failed"]
        if code != _FAILED_TESTS or not failed:
            return code
        if len(failed) > MOST_TRIED:
            print(f"\n{len(failed)} tests failed: more than {MOST_TRIED} are not run again", flush=True)
            return code
        print(f"\nrunning {len(failed)} failed {'test' if len(failed) == 1 else 'tests'} alone", flush=True)
        alone = [*arguments, *cache, "-n", "0", "--dist", "no", "--last-failed", "--last-failed-no-failures", "none"]
        _, second = run(alone, Path(folder, "second.json"))
        passed = {name: text for name, text in failed.items() if name in second["passed"]}
        collected = os.environ.get("ACCEL_PASSED_ALONE")
        log = Path(collected or f"{folder}/passed_alone")
        add(log, passed)
        too_many = 0 if collected else summarize(log)
        again = sorted(failed.keys() - passed.keys())
        if again:
            print("\nfailed again when run alone:", *again, sep="\n  ", flush=True)
        return code if again else too_many


def run(arguments: list[str], results: Path) -> tuple[int, dict[str, dict[str, str]]]:
    """Run pytest; return its exit code and the outcomes that the workspace's conftest.py has written.

    Returns:
        The exit code, and ``{"failed": {test: its failure}, "passed": {test: ""}}``. Both are empty if pytest ended
        before it could write them.
    """
    environment = {**os.environ, "ACCEL_TEST_RESULTS": str(results)}
    if results.stem == "second":
        # Otherwise the limit of time of the first run would skip these tests.
        environment.pop("ACCEL_TEST_UNTIL", None)
    code = subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment).returncode
    if not results.exists():
        return code, {"failed": {}, "passed": {}}
    found: dict[str, dict[str, str]] = json.loads(results.read_text(encoding="utf-8"))
    return code, found


def add(log: Path, passed: dict[str, str]) -> None:
    """Append tests that passed when they ran alone, with their first failures."""
    with log.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps([name, text]) + "\n" for name, text in passed.items())


def summarize(log: Path) -> int:
    """Print the tests that passed when they ran alone; return 1 if there are too many."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    entries = [json.loads(line) for line in lines]
    if entries:
        print(f"\n{f' passed when run alone: {len(entries)} ':=^120}")
        for name, text in entries:
            print(f"{f' {name} ':_^120}\n{text}\n")
        print(*(f"passed when run alone: {name}" for name, _ in entries), sep="\n")
    if len(entries) > MOST:
        print(f"{len(entries)} tests passed only when run alone; at most {MOST} may")
    sys.stdout.flush()
    return int(len(entries) > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
