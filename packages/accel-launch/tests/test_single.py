"""One process: the script runs as python runs it, in the right environment."""

from __future__ import annotations

import json
import signal

import pytest

SHOW = """
import json, os, sys
env = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "OMP_"))}
print(json.dumps({"argv": sys.argv, "env": env, "name": __name__}))
"""


@pytest.fixture
def show(shell):
    shell.write("show.py", SHOW)

    def run(*words: str, **env: str) -> dict:
        result = shell.accel("launch", "--quiet", *words, **env)
        assert result.returncode == 0 and result.stderr == "", result.stderr
        return json.loads(result.stdout)

    return run


def test_options_reach_the_script(show) -> None:
    words = (
        "--cpu --mixed_precision bf16 --gradient-accumulation-steps 4 --debug --dynamo_backend inductor "
        "--dynamo_use_dynamic"
    ).split()
    assert show(*words, "--num_cpu_threads_per_process=3", "show.py")["env"] == {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "true",
        "OMP_NUM_THREADS": "3",
    }


def test_a_script_that_creates_a_process_group_itself(shell) -> None:
    """It works under torchrun with one process, so it does here; two at a time get different ports."""
    shell.write(
        "group.py",
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "names = 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR'\n"
        "print(dist.get_rank(), dist.get_world_size(), *(os.environ[name] for name in names))\n"
        "from accel_state import PartialState\n"
        "assert PartialState(cpu=True).num_processes == 1\n"
        "dist.destroy_process_group()\n",
    )
    result = shell.accel("launch", "--quiet", "--cpu", "group.py", RANK="3", WORLD_SIZE="8")
    assert (result.returncode, result.stdout.split()) == (0, ["0", "1", "0", "1", "127.0.0.1"]), result.stderr
    shell.write("port.py", "import os; print(os.environ['MASTER_PORT'])")
    assert shell.accel("launch", "--quiet", "--main_process_port", "29654", "port.py").stdout == "29654\n"


def test_the_scripts_arguments_are_untouched(show) -> None:
    words = ["--cpu", "-m", "--", "x y", "--num_processes", "7", "$HOME", "", "--help"]
    assert show("--cpu", "show.py", *words)["argv"] == ["show.py", *words]
    assert show("--cpu", "--", "show.py", "a")["argv"] == ["show.py", "a"]


def test_module_and_executable(show, shell) -> None:
    shell.write("pkg/__init__.py", "")
    shell.write("pkg/mod.py", SHOW)
    shell.write("pkg/__main__.py", SHOW)
    assert show("-m", "pkg.mod", "-m", "x")["argv"][1:] == ["-m", "x"]
    shell.write("run.sh", '#!/bin/bash\necho "{\\"argv\\": \\"$1$ACCELERATE_USE_CPU\\"}"\n').chmod(0o755)
    assert show("--cpu", "--no_python", "run.sh", "x")["argv"] == "xtrue"


@pytest.mark.parametrize("options", [[], ["--num_processes", "2"]], ids=["one", "two"])
def test_executables_do_not_inherit_ignored_signals(shell, options) -> None:
    shell.write("run.sh", "#!/bin/bash\ngrep SigIgn /proc/self/status\n").chmod(0o755)
    result = shell.launch("--quiet", *options, "--no_python", "run.sh")
    masks = {int(line.split()[1], 16) for line in result.stdout.splitlines()}
    assert masks and all(not mask & 1 << (number - 1) for mask in masks for number in (signal.SIGPIPE, signal.SIGXFSZ))


def test_a_directory_with_main(show, shell) -> None:
    shell.write("app/__main__.py", SHOW)
    assert show("app", "x")["argv"] == ["app", "x"]


@pytest.mark.parametrize("code", [0, 7])
def test_exit_code(shell, code) -> None:
    shell.write("s.py", f"raise SystemExit({code})")
    assert shell.accel("launch", "s.py").returncode == code


def test_death_by_signal_is_passed_on(shell) -> None:
    shell.write("s.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert shell.accel("launch", "s.py").returncode == -signal.SIGKILL


def test_traceback_ends_the_output(shell) -> None:
    shell.write("s.py", "raise ValueError('boom')")
    result = shell.accel("launch", "--cpu", "s.py")
    assert result.returncode == 1 and result.stderr.endswith("ValueError: boom\n")


def test_signals_reach_the_script(shell, started) -> None:
    shell.write(
        "s.py",
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("ready")
        time.sleep(300)
    """,
    )
    launcher = started(shell.start("launch", "--cpu", "s.py"))
    assert launcher.stdout.readline() == "ready\n", "output is not held back"
    launcher.terminate()
    assert launcher.wait(60) == 9


def test_the_launcher_prints_the_number_of_processes(shell) -> None:
    shell.write("s.py", "")
    said = shell.accel("launch", "--cpu", "s.py").stderr
    assert (
        said == "accel launch: starting 1 process (one per machine, --cpu is set); set --num_processes to change it\n"
    )


def test_no_torch_in_the_launcher(shell) -> None:
    shell.write("s.py", "")
    result = shell.python("""
        import os, sys
        def execve(*arguments):
            assert not [name for name in ("torch", "numpy", "psutil", "yaml") if name in sys.modules]
            print("replaced")
            sys.exit(0)
        os.execve = execve
        from accel_launch.cli import main
        main(["launch", "--cpu", "--num_processes", "1", "s.py"])
    """)
    assert result.stdout == "replaced\n", result.stderr


def test_python_options_carry_over(shell) -> None:
    import subprocess
    import sys

    shell.write("s.py", "import sys; print(sys.flags.optimize, sys.flags.dont_write_bytecode, sys.warnoptions)")
    words = [sys.executable, "-OO", "-B", "-W", "ignore", "-m", "accel_launch", "launch", "--cpu", "s.py"]
    result = subprocess.run(
        words, cwd=shell.folder, env=shell.env, capture_output=True, text=True, timeout=100, check=True
    )
    assert result.stdout == "2 1 ['ignore']\n"
