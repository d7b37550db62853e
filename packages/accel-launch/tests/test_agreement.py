"""What machines must agree on before anything starts: real launchers' facts, compared by real boards on loopback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_launch.config.read import load_settings
from accel_launch.launch_plan import make_plan
from accel_launch.network import agreement
from accel_launch.network.board import Board, Hub, join
from accel_launch.parser import parse

COMMON = ["--cpu", "--num_machines=2", "--num_processes=4", "--main_process_ip=127.0.0.1"]


@dataclass
class Given:
    """What one machine is started with, where it differs from the other one."""

    words: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    script: str = "print('same')\n"
    name: str = "train.py"
    versions: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()


# What only the second machine has, what the table says about it, and whether it is refused.
CASES = {
    "num_processes": (Given(("--num_processes=2",)), "num_processes", True),
    "num_machines": (Given(("--num_machines=4",)), "num_machines", True),
    "script": (Given(script="print('other')\n"), "script", True),
    "name of the script": (Given(name="other.py"), "script", True),
    "mixed_precision": (Given(("--mixed_precision=bf16",)), "mixed_precision", True),
    "accumulation": (Given(("--gradient_accumulation_steps=2",)), "gradient_accumulation_steps", True),
    "variable": (Given(env=(("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3"),)), "gradient_accumulation_steps", True),
    "fsdp": (Given(("--use_fsdp", "--fsdp_version=2")), "fsdp_version", True),
    "debug": (Given(("--debug",)), "debug", True),
    "restarts": (Given(("--max_restarts=1",)), "max_restarts", True),
    "dynamo": (Given(("--dynamo_backend=inductor",)), "dynamo_backend", True),
    "torch": (Given(versions=(("torch", "1.0.0"),)), "version of torch", True),
    "accel": (Given(versions=(("accel", "0.9.0"),)), "version of accel", True),
    "build of torch": (Given(versions=(("torch", "+other"),)), "build of torch", False),
    "python": (Given(versions=(("python", "3.9.0"),)), "Python", False),
    "arguments": (Given(args=("--out", "/local")), "arguments of the script", False),
    "machine_timeout": (Given(("--machine_timeout=60",)), "machine_timeout", False),
    "interval": (Given(("--monitor_interval=1",)), "monitor_interval", False),
    "threads": (Given(("--num_cpu_threads_per_process=7",)), "OMP_NUM_THREADS", False),
    "nccl": (Given(env=(("NCCL_ALGO", "Ring"),)), "NCCL_ALGO", False),
}


def facts(folder: Path, given: Given, rank: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The facts of a launcher that is started like this."""
    with monkeypatch.context() as changed:
        folder.mkdir()
        (folder / given.name).write_text(given.script)
        changed.chdir(folder)
        for name, value in given.env:
            changed.setenv(name, value)
        real = agreement._version
        versions = dict(given.versions)

        def version(name: str) -> str:
            told = versions.get(name, "")
            return real(name) + told if told.startswith("+") else told or real(name)

        changed.setattr(agreement, "_version", version)
        if "python" in versions:
            changed.setattr(agreement.platform, "python_version", lambda: versions["python"])
        line = parse([*COMMON, f"--machine_rank={rank}", *given.words, given.name, *given.args])
        return agreement.facts_of_plan(make_plan(load_settings(line.options), line.script, line.script_args))


def meet(first: dict[str, str], second: dict[str, str], wait_until) -> tuple[Board, Board]:
    """Two boards that have met."""
    hub = join("127.0.0.1", 0, 0, 2, facts=first)
    assert isinstance(hub, Hub)
    member = join("127.0.0.1", hub.port, 1, 2, facts=second)
    wait_until(lambda: len(hub.machines()) == len(member.machines()) == 2, "the machines have met")
    return hub, member


@pytest.mark.parametrize("case", CASES)
def test_a_disagreement_is_refused_or_warned_about(tmp_path, monkeypatch, wait_until, capfd, case) -> None:
    """Refused on both machines, with the name, both values and both machines; or a warning that names them."""
    given, name, refused = CASES[case]
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    first = facts(tmp_path / "0", Given(), 0, monkeypatch)
    second = facts(tmp_path / "1", given, 1, monkeypatch)
    hub, member = meet(first, second, wait_until)
    try:
        if refused:
            wait_until(lambda: hub.refusal is not None and member.refusal is not None, "both are refused")
            assert hub.refusal == member.refusal and hub.refusal.code == 2
            table = hub.refusal.text
        else:
            told: list[str] = []
            wait_until(lambda: told.append(capfd.readouterr().err) or name in "".join(told), "a warning")
            table = "".join(told)
            assert hub.refusal is None and member.refusal is None
        key = next(key for key in {**first, **second} if key.endswith(name) and first.get(key) != second.get(key))
        rows = table.splitlines()
        row = next(index for index, text in enumerate(rows) if text.strip().startswith(name))
        for offset, (rank, found) in enumerate(((0, first), (1, second))):
            value = found.get(key, "(default)") or "(not set)"
            assert value[:50] in rows[row + offset] and f"{rank} (" in rows[row + offset], table
    finally:
        member.close(0)
        hub.close(0)


def test_machines_that_differ_as_they_may(tmp_path, monkeypatch, wait_until, capfd) -> None:
    """Rank, files, devices, and how the main address is written are a machine's own."""
    own = Given(("--main_process_ip=localhost", "--log_dir=logs", "--enable_cpu_affinity", "--quiet"))
    hub, member = meet(
        facts(tmp_path / "0", Given(), 0, monkeypatch), facts(tmp_path / "1", own, 1, monkeypatch), wait_until
    )
    member.close(0)
    hub.close(0)
    assert hub.refusal is None and capfd.readouterr().err == ""


def test_secrets_are_not_sent(tmp_path, monkeypatch) -> None:
    given = Given(("--aws_secret_access_key=verysecret", "--aws_access_key_id=alsosecret"), args=("--token", "sesame"))
    assert "secret" not in str(facts(tmp_path / "0", given, 0, monkeypatch)).replace("sha256", "")
    assert "sesame" not in str(facts(tmp_path / "1", given, 0, monkeypatch))


def test_two_launchers_that_disagree_start_nothing(shell, started, free_port) -> None:
    """Before, the machines trained with fewer steps and exit code 0."""
    shell.write("s.py", "import pathlib, os; pathlib.Path('ran' + os.environ['RANK']).touch()")
    words = ["launch", "--cpu", "--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={free_port()}"]
    launchers = [
        started(shell.fork(*words, f"--machine_rank={rank}", f"--num_processes={2 + 2 * rank}", "s.py"))
        for rank in (0, 1)
    ]
    errors = [launcher.communicate(timeout=110)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [2, 2], errors
    assert errors[0] == errors[1] and "num_processes" in errors[0], errors
    assert not list(shell.folder.glob("ran*"))
