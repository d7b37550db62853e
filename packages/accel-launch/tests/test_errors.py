"""Errors are one line on stderr, with exit code 2, before anything is started."""

from __future__ import annotations

import os
import socket
import sys

import pytest


def fails(shell, *words: str, **env: str) -> str:
    result = shell.call("launch", *words, **env)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert result.stderr.startswith("accel launch: error: ") and result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    return result.stderr


@pytest.fixture
def script(shell) -> str:
    shell.write("s.py", "print('must not run')")
    return "s.py"


def test_no_script(shell) -> None:
    assert "no script is given" in shell.accel("launch").stderr, "as a process of its own"
    assert "no script is given" in fails(shell)
    assert "no script is given" in fails(shell, "--cpu")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--num_processes"], ["--num_processes needs a value", "at least 1"]),
        (
            ["--mixed_precison", "fp16", "s.py"],
            ["--mixed_precison is not an option", "Did you mean --mixed_precision?"],
        ),
        (["--num_proc", "2", "s.py"], ["--num_proc is not an option"]),
        (["--fp16", "s.py"], ["--fp16 is not an option. Did you mean --mixed_precision fp16?"]),
        (["--num_processes", "1000000", "s.py"], ["--num_processes 1000000", "or give --oversubscribe"]),
        (["--num_processes=1000000", "--oversubscribe", "--dry_run", "s.py"], ["shows every process, up to 100000"]),
        (["--virtual-local-rank", "s.py"], ["--virtual-local-rank is not an option. Each process sees all GPUs"]),
        (["--fsdp_offload_params"], ["--fsdp_offload_params needs a value: true or false"]),
        (["--fsdp_offload_params", "s.py"], ["no script is given"]),
        (["-x", "s.py"], ["-x is not an option"]),
        (["--no_python", "-m", "s"], ["-m and --no_python contradict"]),
        (["--num_processes", "2", "--tee", "0:1,2:1", "s.py"], ["--tee 0:1,2:1", "local ranks 0 to 1"]),
        (["--gpu_ids", "0,0", "s.py"], ["--gpu_ids", "different GPU ids"]),
        (
            ["--num_machines", "2", "--num_processes", "3", "s.py"],
            ["--num_processes 3", "--num_machines 2", "multiple"],
        ),
        (["--num_machines", "2", "--num_processes", "2", "s.py"], ["--num_machines 2 needs --main_process_ip"]),
        (["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h", "s.py"], ["needs --machine_rank"]),
        (
            [
                "--num_machines=2",
                "--num_processes=2",
                "--main_process_ip=h",
                "--machine_rank=0",
                "--main_process_port=0",
                "s.py",
            ],
            ["--main_process_port 0"],
        ),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_options(shell, script, words, parts) -> None:
    message = fails(shell, *words)
    for part in parts:
        assert part in message


@pytest.mark.skipif(any(name.startswith("nvidia") for name in os.listdir("/dev")), reason="this machine has a GPU")
def test_missing_gpus(shell, script) -> None:
    assert "no GPU is visible" in fails(shell, "--multi_gpu", script)
    assert "--gpu_ids 0: this machine has no GPU" in fails(shell, "--gpu_ids", "0", script)


def test_missing_scripts(shell) -> None:
    assert "script 'nope.py' does not exist" in fails(shell, "nope.py")
    assert "accel launch -m json.tool" in fails(shell, "json.tool")
    assert "accel launch --no_python ls" in fails(shell, "ls")
    (shell.folder / "folder").mkdir()
    assert "directory without __main__.py" in fails(shell, "folder")


def test_files_that_are_not_python(shell) -> None:
    shell.write("run.sh", "#!/bin/bash\necho no\n")
    assert "'run.sh' is not a Python file" in fails(shell, "run.sh") and "--no_python" in fails(shell, "run.sh")
    assert "is not a Python file" in fails(shell, os.path.realpath(sys.executable))


def test_missing_modules_and_executables(shell) -> None:
    shell.write("pkg/__init__.py", "raise SystemExit('a check must not import the package')")
    shell.write("pkg/inner.py", "")
    assert "-m 'nope': no such module" in fails(shell, "-m", "nope")
    assert "-m 'pkg.nope': no such module" in fails(shell, "-m", "pkg.nope")
    assert "-m 'pkg.inner.deeper': no such module" in fails(shell, "-m", "pkg.inner.deeper")
    assert "package without __main__.py" in fails(shell, "-m", "pkg")
    assert "not a module name" in fails(shell, "-m", "pkg/inner.py")
    shell.write("plain.txt", "text")
    assert "not executable. Run: chmod +x plain.txt" in fails(shell, "--no_python", "plain.txt")
    assert "no such program in PATH" in fails(shell, "--no_python", "no-such-program")


def test_a_port_in_use_is_an_error_at_once(shell, script) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        message = fails(shell, "--num_processes", "2", "--main_process_port", str(port), script)
    assert f"--main_process_port {port}: the port is in use" in message


def test_an_unknown_host(shell, script) -> None:
    words = ["--num_machines=2", "--machine_rank=0", "--num_processes=2", "--main_process_port=4711", script]
    words.insert(0, "--main_process_ip=nowhere.invalid")
    assert "'nowhere.invalid' is not a known host" in fails(shell, *words)


def test_a_log_dir_that_cannot_be_created(shell, script) -> None:
    shell.write("file", "")
    assert "--log_dir 'file/logs' cannot be created: Not a directory" in fails(
        shell, "--num_processes=2", "--log_dir=file/logs", script
    )
