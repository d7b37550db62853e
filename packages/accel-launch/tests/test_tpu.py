"""TPUs. A stand-in for torch_xla starts four processes, and refuses what it refuses; tests/test_xla_launch.py has the
real one, with a CPU.
"""

from __future__ import annotations

import json
import subprocess

import pytest

# torch_xla.distributed.xla_multiprocessing.spawn(fn, args=(), nprocs=None, join=True, daemon=False,
# start_method="spawn")
STAND_IN = """
import multiprocessing

def spawn(fn, args=(), nprocs=None, join=True, daemon=False, start_method="spawn"):
    if nprocs not in (None, 1):
        raise ValueError(f"Unsupported nprocs ({nprocs}). Please use nprocs=1 or None (default).")
    context = multiprocessing.get_context(start_method)
    processes = [context.Process(target=fn, args=(index, *args)) for index in range(nprocs or 4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)
"""
SCRIPT = """
import json, os, sys
import helper
LIMIT = helper.LIMIT

def main():
    names = ("PJRT_DEVICE", "XLA_USE_BF16", "ACCELERATE_MIXED_PRECISION")
    with open(f"core{os.getpid()}.json", "w") as file:
        json.dump([LIMIT, sys.argv, {name: os.environ.get(name) for name in names}], file)

class Trainer:
    pass

if __name__ == "__main__":
    raise SystemExit("a script on a TPU is imported")
"""


@pytest.fixture
def tpu(shell):
    """A shell in which torch_xla can be imported."""
    shell.write(
        "site/torch_xla/__init__.py", "class _XLAC:\n    _xla_runtime_is_initialized = staticmethod(lambda: False)\n"
    )
    shell.env["TPU_LIBRARY_PATH"] = str(shell.write("lib/libtpu.so", ""))
    shell.write("site/torch_xla/distributed/__init__.py", "")
    shell.write("site/torch_xla/distributed/xla_multiprocessing.py", STAND_IN)
    shell.write("job/helper.py", "LIMIT = 3\n")
    shell.write("job/s.py", SCRIPT)
    shell.env["PYTHONPATH"] += f":{shell.folder / 'site'}"
    return shell


def launch(shell, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``accel launch --tpu WORDS`` where torch is imported already."""
    return shell.forked_python(f"""
        import os, sys
        sys.path[:0] = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep)]
        os.environ.update({variables!r})
        from accel_launch.cli import main
        sys.exit(main({["launch", "--tpu", *words]!r}))
    """)


def cores(shell) -> list:
    return [json.loads(file.read_text()) for file in shell.folder.glob("core*.json")]


@pytest.mark.parametrize(("words", "count"), [(("--num_processes=8",), 4), (("--num_processes=1",), 1)])
def test_every_chip_calls_the_function(tpu, words, count) -> None:
    result = launch(tpu, "--mixed_precision=bf16", *words, "job/s.py", "--lr", "0.1")
    assert result.returncode == 0, result.stderr
    assert ("one process for each chip" in result.stderr) is ("--num_processes=8" in words)
    variables = {"PJRT_DEVICE": "TPU", "XLA_USE_BF16": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert cores(tpu) == [[3, ["job/s.py", "--lr", "0.1"], variables]] * count


def test_a_module(tpu) -> None:
    tpu.write("package/__init__.py", "")
    tpu.write("package/train.py", SCRIPT.replace("import helper\n", "").replace("helper.LIMIT", "5"))
    result = launch(tpu, "--num_processes=1", "-m", "package.train")
    assert result.returncode == 0, result.stderr
    assert [core[0] for core in cores(tpu)] == [5]


@pytest.mark.parametrize("name", ["train", "LIMIT"])
def test_the_function_is_missing(tpu, name) -> None:
    result = launch(tpu, f"--main_training_function={name}", "job/s.py")
    says = f"s.py has no function '{name}'"
    assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_torch_xla_is_missing(shell) -> None:
    shell.write("s.py", "def main(): pass\n")
    result = launch(shell, "s.py")
    assert result.returncode == 2 and "torch_xla" in result.stderr and "pip install" in result.stderr


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TPU_LIBRARY_PATH": ""}, "PJRT_DEVICE=TPU needs libtpu"),
        ({"PJRT_DEVICE": "GPU"}, "PJRT_DEVICE=GPU is not a device of torch_xla. Set it to one of TPU, CPU"),
    ],
)
def test_the_device_is_missing(tpu, variables, says) -> None:
    result = launch(tpu, "job/s.py", **variables)
    assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_mesh_is_one_process(tpu) -> None:
    words = ("--use_parallelism_config", "--parallelism_config_dp_shard_size=4")
    result = launch(tpu, "--mixed_precision=bf16", *words, "job/s.py")
    assert result.returncode == 0, result.stderr
    assert len(cores(tpu)) == 1


def test_a_file_that_is_not_a_module(tpu) -> None:
    tpu.write("script", SCRIPT)
    result = launch(tpu, "script")
    assert result.returncode == 2 and "script cannot be imported as a module" in result.stderr, result.stderr


def test_a_notebook(tpu) -> None:
    """A closure over a value that cannot be pickled: the processes are forked."""
    result = tpu.forked_python("""
        import os, sys, threading
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        from accel_launch import notebook_launcher
        lock = threading.Lock()
        def train(model, epochs):
            with lock:
                # One write: lines of several processes must not mix.
                device, precision = os.environ["PJRT_DEVICE"], os.environ["ACCELERATE_MIXED_PRECISION"]
                os.write(1, f"{model} {epochs} {device} {precision}\\n".encode())
        os.environ["TPU_NAME"] = "local"
        notebook_launcher(train, ({"weights": 1}, 3), mixed_precision="bf16")
        notebook_launcher(train, (None, 1), num_processes=1)
        assert "PJRT_DEVICE" not in os.environ
    """)
    assert result.returncode == 0, result.stderr
    all_chips, one = ["{'weights': 1} 3 TPU bf16"] * 4, ["None 1 TPU no"]
    expected = ["Launching training on all TPU chips.", *all_chips, "Launching training on one TPU chip.", *one]
    assert result.stdout.splitlines() == expected, result.stdout


class TestTpuConfig:
    """The command lines; gcloud itself is a script that repeats them."""

    WORDS = ("--tpu_name", "pod", "--tpu_zone", "z")

    def test_debug_prints_the_command(self, shell) -> None:
        words = ("--command", "echo", "hi", "--command", "ls -l", "--install_accel", "--accel_version", "1.2")
        result = shell.call("tpu-config", "--debug", *self.WORDS, *words)
        line = "cd /usr/share; pip install accel==1.2; echo hi; ls -l"
        assert (
            result.stdout == f"Running gcloud compute tpus tpu-vm ssh pod --zone z --command '{line}' --worker all\n"
        ), result.stderr

    def test_the_file_and_the_configuration(self, shell) -> None:
        shell.write("commands", "# first\necho 1\n\necho 2\n")
        shell.write("c.yaml", "tpu_name: pod\ntpu_zone: z\ncommands: [pwd]\ndistributed_type: TPU\n")
        assert (
            "'cd /usr/share; pwd' --worker all" in shell.call("tpu-config", "--debug", "--config_file", "c.yaml").stdout
        )
        shown = shell.call(
            "tpu-config", "--debug", "--config_file", "c.yaml", "--command_file", "commands", "--use_alpha"
        ).stdout
        assert shown.startswith("Running gcloud alpha compute") and "'cd /usr/share; echo 1; echo 2'" in shown
        shown = shell.call("tpu-config", "--debug", "--tpu_zone=z", "--vm=a", "--vm=b", "--install_accel").stdout
        assert [line.split()[4] for line in shown.splitlines()] == ["a", "b"] and "pip install -U accel" in shown

    @pytest.mark.parametrize("code", [0, 3])
    def test_gcloud_is_run(self, shell, code) -> None:
        shell.write("bin/gcloud", f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {code}\n').chmod(0o755)
        result = shell.accel("tpu-config", *self.WORDS, "--command=ls", PATH=f"{shell.folder / 'bin'}:/usr/bin:/bin")
        assert result.returncode == code
        assert result.stdout.splitlines()[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod"] and (
            "commands succeeded" in result.stdout
        ) is (code == 0)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--command", "ls"), "--tpu_name and --tpu_zone must be given"),
            (WORDS, "no command is given"),
            ((*WORDS, "--command_file", "none"), "--command_file 'none' cannot be read"),
            ((*WORDS, "--command=ls"), "gcloud is not on PATH"),
            (("--bogus",), "--bogus"),
        ],
    )
    def test_missing_requirements(self, shell, words, says) -> None:
        result = shell.call("tpu-config", *words, PATH="")
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr
