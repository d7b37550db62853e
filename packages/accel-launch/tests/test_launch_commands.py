"""Commands and environments for programs that start processes themselves."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_launch.launch_commands import (
    PrepareForLaunch,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    test_launch,
)
from accel_launch.launchers.tpu import prepare_tpu
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def arguments(script: Path, **options: Any) -> argparse.Namespace:
    # Parsers leave options that were not given at None, and have other attributes.
    return argparse.Namespace(
        training_script=str(script),
        training_script_args=["--lr", "1"],
        num_machines=None,
        of_the_program=7,
        cpu=True,
        **options,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['ACCELERATE_MIXED_PRECISION']]))\n"
    )
    return path


def test_the_command_of_one_process_runs(script: Path) -> None:
    command, environment = prepare_simple_launcher_cmd_env(arguments(script, num_processes=1, mixed_precision="bf16"))
    assert command[0] == sys.executable and command[-3:] == [str(script), "--lr", "1"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=True)
    assert json.loads(found.stdout) == [["--lr", "1"], "bf16"]


def test_several_processes_have_no_single_command(script: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"num_processes=2.*command.*accel_launch\.launch"):
        prepare_simple_launcher_cmd_env(arguments(script, num_processes=2))
    with pytest.raises(ConfigurationError, match="args has no training_script"):
        prepare_simple_launcher_cmd_env(argparse.Namespace(num_processes=1))


def test_variables_of_all_processes(script: Path) -> None:
    environment = prepare_multi_gpu_env(
        arguments(script, num_processes=2, use_fsdp=True, fsdp_version=2, fsdp_reshard_after_forward=False)
    )
    assert environment["ACCELERATE_USE_FSDP"] == "true" and environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "false" and environment["PATH"] == os.environ["PATH"]
    with pytest.raises(ConfigurationError, match="mixed_precision"):
        prepare_multi_gpu_env(arguments(script, mixed_precision="fp61"))


def test_tpu_questions(script: Path) -> None:
    args = argparse.Namespace(
        training_script=str(script), training_script_args=[], mixed_precision="bf16", downcast_bf16=True
    )
    returned, environment = prepare_tpu(args, {"A": "1"})
    assert returned is args and environment == {"A": "1", "PJRT_DEVICE": "TPU", "XLA_DOWNCAST_BF16": "1"}
    assert prepare_tpu(args, {}, pod=True)[1] == {"PJRT_DEVICE": "TPU", "XLA_DOWNCAST_BF16": "1"}


def note_place(found: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    found.append((os.environ.get("RANK"), os.environ.get("LOCAL_RANK"), total.item()))


def started_by_another_launcher(kind: str, file: str) -> Any:
    index, found = int(os.environ.pop("RANK")), list[Any]()
    del os.environ["LOCAL_RANK"]
    os.environ.update(LOCAL_WORLD_SIZE="2", NODE_RANK="1", WORLD_SIZE="2", ACCELERATE_DEBUG_RDV_FILE=file)
    PrepareForLaunch(note_place, kind, debug=True)(index, found)
    return found[0]


@pytest.mark.parametrize(("kind", "ranks"), [("MULTI_CPU", [("2", "0"), ("3", "1")]), ("NO", [(None, None)] * 2)])
def test_a_process_of_another_launcher_gets_its_rank(kind: str, ranks: list[Any], tmp_path: Path) -> None:
    found = run_world(started_by_another_launcher, 2, kind, str(tmp_path / "meet"), state=False)
    assert [(rank, local) for rank, local, _ in found] == ranks and [total for *_, total in found] == [2.0, 2.0]
    with pytest.raises(ConfigurationError, match="WORLD_SIZE.*ACCELERATE_DEBUG_RDV_FILE"):
        PrepareForLaunch(note_place, debug=True)(0, [])


@pytest.mark.slow  # two interpreters that import torch; the functions have fast tests in this process
def test_test_launch_checks_the_environment() -> None:
    code = "from accel_launch.launch_commands import test_launch; test_launch()"
    for place, works in (({}, True), ({"RANK": "1", "WORLD_SIZE": "x"}, False)):
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", **place}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=100)
        assert (result.returncode == 0) is works, result.stderr
    assert not test_launch.__test__
