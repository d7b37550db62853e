"""``accel doctor``: a verdict on this machine, and advice for whatever does not work."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import resource
import socket
import sys

import pytest

from accel_launch import remedies
from accel_launch.commands import doctor
from accel_launch.config.read import load_settings
from accel_launch.doctor import group, machine, ranks
from accel_launch.doctor.group import check_group
from accel_launch.doctor.result import CheckResult, run_check
from accel_launch.elastic.report import RankFailure, with_hint
from accel_launch.launch_plan import make_plan
from accel_launch.network.agreement import FACTS_VARIABLE, facts_of_plan
from accel_launch.remedies import remedy

SCARCE = ("memory", "shared memory", "temporary")


def findings(check) -> dict[str, CheckResult]:
    return {finding.subject: finding for finding in check()}


@pytest.mark.timeout(150)
def test_this_machine_works(shell) -> None:
    words = ("doctor", "--timeout", "100", "--cpu", "--num_processes", "2")
    started = shell.fork(*words, GLOO_SOCKET_IFNAME="lo")
    output, errors = started.communicate()
    subjects = [line[6:20].strip() for line in output.splitlines() if line[:5] in ("ok   ", "warn ", "fail ")]
    # A container may have little shared memory, and a busy machine few free resources, which the doctor reports.
    failed = [line for line in output.splitlines() if line.startswith("fail ")]
    assert all(line[6:20].strip() in SCARCE for line in failed), output + errors
    assert started.returncode == bool(failed)
    here = ["python", "torch", "devices", "computing", "memory", "open files", "ports", "configuration"]
    expected = [*here, "process group", "all-reduce", "point to point"]
    assert [subject for subject in subjects if subject in expected] == expected
    assert bool(failed) or "all checks passed" in output
    assert "all-reduce     correct; " in output


@pytest.mark.slow  # waits for failing checks; test_missing_resources_are_reported is fast
def test_every_failure_has_advice_and_sets_the_exit_code(shell) -> None:
    shell.write("c.yaml", "num_proceses: 2\n")
    code = """
    import resource, subprocess, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    sys.exit(subprocess.call([sys.executable, "-m", "accel_launch", "doctor", "--timeout", "0.1", "--cpu"]))
    """
    shell.env.update(ACCELERATE_CONFIG_FILE="", HF_HOME=str(shell.folder), RANK="3")
    shell.write("accel/default_config.yaml", "num_proceses: 2\n")
    result = shell.python(code)
    # An invalid file is a usage error too, because it determines what is checked.
    assert result.returncode == 2 and "num_proceses is not a known key" in result.stderr
    (shell.folder / "accel" / "default_config.yaml").unlink()
    result = shell.python(code)
    lines = result.stdout.splitlines()
    failed = [
        index for index, line in enumerate(lines) if line.startswith("fail ") and line[6:20].strip() not in SCARCE
    ]
    assert result.returncode == 1 and re.match(r"\d checks? failed", lines[-1])
    assert [lines[index][6:20].strip() for index in failed] == ["open files", "processes"]
    assert all(lines[index + 1].startswith("        -> ") for index in failed)
    assert "This machine allows 256; its administrator" in result.stdout
    assert "warn  variables      RANK=3 set: scripts would run as this rank" in result.stdout
    # How far ranks get in that time depends on the machine.
    assert re.search(r"not finished after 0\.1 s: (no process has started|rank \d: )", result.stdout)


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_an_invalid_timeout(shell, text) -> None:
    result = shell.accel("doctor", f"--timeout={text}")
    assert result.returncode == 2 and "is not a positive number of seconds" in result.stderr


def test_missing_resources_are_reported(monkeypatch) -> None:
    monkeypatch.setattr(machine, "MIN_SHARED_MEMORY", 2**60)
    monkeypatch.setattr(machine, "MIN_MEMORY", 2**60)
    monkeypatch.setattr(machine, "MIN_TEMPORARY", 0)
    found = findings(machine.check_memory)
    assert found["shared memory"].failed and "--shm-size" in found["shared memory"].advice and found["memory"].failed
    assert not found["temporary"].failed
    for soft, state in ((100, "fail"), (1024, "warn"), (4096, "ok"), (-1, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, 10**6))
        found = findings(machine.check_limits)["open files"]
        assert found.state == state and found.advice.startswith("Run `ulimit -n 4096` before launching: ") == (
            state != "ok"
        )
    monkeypatch.setattr("accel_launch.accelerators.registry.find_installed", lambda: (4, ("CUDA_VISIBLE_DEVICES",)))
    found = findings(machine.check_devices)
    assert found["devices"].failed and "the machine has 4 accelerator(s), but torch" in found["devices"].text
    monkeypatch.setattr(machine, "MIN_TORCH", (99, 0))
    assert findings(machine.check_versions)["torch"].failed
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    resolve = socket.getaddrinfo

    def know_no_such_host(host, *args, **options):
        # What a name service says of it, and how soon, is not for this test.
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **options)

    monkeypatch.setattr("socket.getaddrinfo", know_no_such_host)
    assert findings(machine.check_network)["host name"].state == "warn"


def test_replicas_need_torchft(monkeypatch) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    (missing,) = machine.check_torchft()
    assert missing.failed and "pip install 'accel[ft]'" in missing.line()
    monkeypatch.undo()
    monkeypatch.setattr("accel_launch.doctor.group.check_group", lambda *arguments: iter(()))
    asked = [subject.line() for subject in doctor._results(doctor.read_command_line(["--ft"]))]
    assert any(re.match(r"\w+ +torchft", line) for line in asked), asked
    plain = [subject.line() for subject in doctor._results(doctor.read_command_line([]))]
    assert not any("torchft" in line for line in plain)


def test_a_check_that_raises_is_a_failed_result() -> None:
    def check():
        yield CheckResult("a", "ok", "fine")
        raise RuntimeError("no such thing\nsecond line")

    first, second = run_check("thing", check)
    assert first.state == "ok" and second.failed and "RuntimeError: no such thing" in second.text and second.advice


def test_processes_that_fail_are_quoted(shell) -> None:
    (found,) = check_group(["--num_processes=2", "--cpu", "--main_process_port=x"], shell.env, 60)
    assert (
        found.failed
        and "failed with exit code 2" in found.text
        and "'x' is not an integer from 0 to 65535" in found.text
    )


def test_versions_are_those_of_this_machine() -> None:
    assert machine.versions()["torch"] == importlib.metadata.version("torch")
    assert machine.versions()["python"] == ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize("machines", [2, 3, 8, 9])
def test_every_pair_of_machines_is_measured_once_and_none_is_in_two_at_a_time(machines: int) -> None:
    planned = ranks.rounds(machines)
    pairs = [pair for one in planned for pair in one]
    assert sorted(pairs) == list(itertools.combinations(range(machines), 2))
    assert all(len({machine for pair in one for machine in pair}) == 2 * len(one) for one in planned)
    assert len(planned) == machines - 1 + machines % 2


def test_a_slow_pair_of_machines_is_named() -> None:
    fast, slow = 400 * ranks.MIB, 100 * ranks.MIB
    three = [(0, 1, 1e-4, fast), (0, 2, 1e-4, fast), (1, 2, 3e-4, slow)]
    first, *listed = ranks.describe_pairs(["a", "b", "c"], three)
    assert (first.state, first.text) == ("warn", "slow: b - c: 0.30 ms, 100 MiB/s") and "400 MiB/s" in first.advice
    assert [one.text for one in listed] == [
        "a - b: 0.10 ms, 400 MiB/s",
        "a - c: 0.10 ms, 400 MiB/s",
        "b - c: 0.30 ms, 100 MiB/s",
    ]
    many = [(one, other, 1e-4, fast) for one, other in itertools.combinations(range(6), 2)]
    (only,) = ranks.describe_pairs(list("abcdef"), many)
    assert only.state == "ok" and only.text.startswith("15 pairs: 0.10 to 0.10 ms, 400 to 400 MiB/s")


def test_the_doctor_gives_the_remedy_that_the_launcher_prints() -> None:
    error = 'RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] timed out, remote=[127.0.1.1]:5507$0"'
    failure = RankFailure(1, 0, 1, 1, time_ns=1, traceback=f'  File "s.py", line 1, in f\n{error}')
    assert with_hint(failure, [], 2).hint == remedy(error) == remedies.HOST_NAME
    assert remedy("AssertionError: Torch not compiled with CUDA enabled") == remedies.NO_DEVICE
    assert remedy("Expected all tensors to be on the same device, but got cuda:0, cpu") == remedies.TWO_DEVICES
    assert remedy("connectFullMesh failed, remote=[10.0.0.2]:5507") == remedies.NETWORK
    assert group._advice(["--num_machines=2"], f"accel launch: rank 1 of 2 failed first\n{error}") == remedy(error)
    assert remedy("DistNetworkError: The client socket has timed out, No route to host") == remedies.NETWORK
    assert remedy("urllib3: Max retries exceeded, [Errno 113] No route to host, Address already in use") == ""
    assert "Run the doctor on every machine" in group._advice(["--num_machines=2"], "something else")


def test_the_doctor_compares_what_the_command_line_of_a_launch_would_start(shell, monkeypatch) -> None:
    shell.write("s.py", "print('never started')\n")
    monkeypatch.chdir(shell.folder)
    words = ["--num_machines=2", "--num_processes=2", "--machine_rank=1", "--main_process_ip=127.0.0.1"]
    parsed = doctor.read_command_line(
        ["--cpu", "--timeout", "5", *words, "--mixed_precision=bf16", "s.py", "--timeout=3"]
    )
    assert (parsed.seconds, parsed.script) == (5.0, ["s.py", "--timeout=3"])
    facts = doctor.facts_of(load_settings(parsed.options), parsed.script)
    launched = facts_of_plan(make_plan(load_settings(parsed.options), "s.py", ["--timeout=3"]))
    assert facts == launched and facts["must mixed_precision"] == "bf16" and "s.py sha256" in facts["must script"]
    monkeypatch.setenv(FACTS_VARIABLE, json.dumps(facts))
    assert facts_of_plan(make_plan(load_settings({"cpu": "true"}), "s.py", [])) == facts
    assert "must script" not in doctor.facts_of(load_settings(parsed.options), [])
