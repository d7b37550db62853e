"""On bad input, clients can catch exceptions of the reference's types (cases: tests/clients/interface_cases.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import accel_compat

CLIENTS = Path(__file__).parent / "clients"


def test_exceptions_on_bad_input_can_be_caught_as_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CLIENTS))
    import run

    path = os.pathsep.join([str(accel_compat.shim_path()), str(CLIENTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            sys.executable,
            CLIENTS / "harness.py",
            "--out",
            tmp_path / "out",
            "--plan",
            '{"interface_cases.py": "refusals_*"}',
        ],
        env={**os.environ, "PYTHONPATH": path, "CASES_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out").read_text())["results"]
    assert "accel_compat" in results.pop("accelerate") and len(results) == 6
    recorded = json.loads(run.RECORDED.read_text())["interface_cases.py 1"]
    for name, result in results.items():
        assert "error" not in result, result
        good, text = run.judge(name, 1, result, recorded[name], run.RECORDED_TOLERANCE)
        assert good, f"{name}: {text}"
    # The comparison finds a type that is not caught.
    assert run.judge_refusals({"a": {"raises": ["ValueError"]}}, {"a": {"raises": ["KeyError"]}})[0] is False
