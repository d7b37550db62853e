"""Credentials appear in nothing that a command prints, wherever the settings come from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accel_launch.config.read import read_config
from accel_launch.doctor.result import warn
from accel_state.errors import ConfigurationError

HUSH = "hush0123"
ENVIRONMENT = {
    "SLURM_JWT": HUSH,
    "ACCELERATE_PWD": HUSH,
    "NCCL_AUTH": HUSH,
    "TORCH_SOMETHING": f"https://me:{HUSH}@host",
    "OMP_NUM_THREADS": "1",
}
# One value for each way in: a known list, commands, an unknown key that is kept, and a section.
FILE = f"""
num_processes: 2
tpu_env:
  - HF_TOKEN={HUSH}
commands:
  - export WANDB_API_KEY={HUSH}; python train.py
command_file: null
"""


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_env(shell, extra: tuple[str, ...]) -> None:
    shell.write("c.yaml", FILE + f"aws_secret_access_key: {HUSH}\n")
    shown = shell.call("env", "--config_file", "c.yaml", *extra, **ENVIRONMENT).stdout
    assert HUSH not in shown
    for name in (*ENVIRONMENT, "tpu_env", "aws_secret_access_key", "num_processes", "HF_TOKEN", "python train.py"):
        assert name in shown, name


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_config_show(shell, extra: tuple[str, ...]) -> None:
    shell.write("c.yaml", FILE)
    shown = shell.call("config", "show", "--config_file", "c.yaml", *extra, **ENVIRONMENT).stdout
    assert HUSH not in shown and "HF_TOKEN" in shown and "python train.py" in shown


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_dry_run(shell, extra: tuple[str, ...]) -> None:
    shell.write("s.py", "")
    words = ["launch", "--dry_run", *extra, "--num_processes", "2", "--env", f"HF_TOKEN={HUSH}"]
    result = shell.call(*words, "s.py", "--api_key", HUSH, f"--password={HUSH}", "--lr", "0.5", **ENVIRONMENT)
    shown = result.stdout
    assert HUSH not in shown + result.stderr and "0.5" in shown and "--api_key" in shown


@pytest.mark.parametrize(
    "text",
    [
        f"aws_secret_acess_key: {HUSH}",
        f"wandb_token: {HUSH}",
        f"fsdp_config: 'password={HUSH}'",
        f"tp_config: 'password={HUSH}'",
        f"nothing: {{inner: {{api_key: {HUSH}}}}}",
        f"a: b\n  api_key: {HUSH}: c",
    ],
)
def test_errors_about_a_file(shell, text: str) -> None:
    path = shell.write("c.yaml", text)
    with pytest.raises(ConfigurationError) as raised:
        read_config(path)
    assert HUSH not in str(raised.value)
    result = shell.call("launch", "--config_file", "c.yaml", "s.py")
    assert result.returncode == 2 and HUSH not in result.stderr + result.stdout


def test_errors_about_the_command_line(shell) -> None:
    shell.write("s.py", "")
    for words in (["--aws_token", HUSH], [f"--aws_tokn={HUSH}"]):
        result = shell.call("launch", *words, "s.py")
        assert result.returncode == 2 and HUSH not in result.stderr, result.stderr


def test_doctor() -> None:
    assert HUSH not in warn("proxy", f"https_proxy is http://me:{HUSH}@host", f"unset HF_TOKEN={HUSH}").line()


def test_the_json_stays_json(shell) -> None:
    shell.write("c.yaml", FILE)
    facts: dict[str, Any] = json.loads(shell.call("env", "--config_file", "c.yaml", "--json", **ENVIRONMENT).stdout)
    assert facts["Environment"]["SLURM_JWT"] == "(hidden)" and facts["Environment"]["OMP_NUM_THREADS"] == "1"
    assert facts["Configuration"]["tpu_env"] == ["HF_TOKEN=(hidden)"]
