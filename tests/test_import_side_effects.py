"""Importing has no side effects, and torch-free modules do not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from workspace import environment, import_name, module_name, projects, sources

# Each test starts a process that imports torch, or everything.
pytestmark = pytest.mark.timeout(300)

# Prints the state that an import could change, before and after. Runs in a separate process.
PROBE = """
import importlib, json, logging, os, random, signal, sys, threading, warnings
from pathlib import Path

def torch_state():
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    names = ("cuda", "xpu", "mtia")
    devices = [name for name in names if getattr(getattr(torch, name, None), "is_initialized", bool)()]
    return {
        "initialised devices": devices,
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "torch generator": hash(torch.random.get_rng_state().numpy().tobytes()),
        "threads of torch": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }

def state():
    loggers = logging.root.manager.loggerDict
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {
        "environment": dict(os.environ),
        "handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "handlers of loggers": sorted(name for name, logger in loggers.items() if getattr(logger, "handlers", [])),
        "level": logging.getLogger().level,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children.read_text() if children.exists() else "",
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "working directory": [os.getcwd(), sorted(os.listdir())],
        "random generator": hash(random.getstate()),
        "filters of warnings": [str(entry) for entry in warnings.filters],
        "hook of exceptions": repr(sys.excepthook),
        **torch_state(),
    }

def changes(modules):
    before = state()
    for name in modules:
        importlib.import_module(name)
    after = state()
    return {key: [before[key], after[key]] for key in before if before[key] != after.get(key)}

jobs, first = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in first:  # what these libraries change is theirs
    importlib.import_module(name)
for job, modules in jobs.items():
    # Each in a process of its own, forked from this one, which has imported nothing of ours.
    pid = os.fork()
    if pid == 0:
        Path(sys.argv[3], job).write_text(json.dumps(changes(modules)))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, job
"""

# Third-party libraries that our modules import at the top; their side effects are not tested.
LIBRARIES = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch.nn.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "numpy",
    "packaging.version",
    "psutil",
    "yaml",
    "safetensors.torch",
    "tqdm.auto",
]


def _python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        check=False,
        env=environment(),
    )


def _torch_is_imported_by(code: str, folder: Path) -> list[str]:
    """The modules of torch that are loaded when the code has run."""
    report = "print('LOADED', *sorted(name for name in sys.modules if name.split('.')[0] in {'torch', 'numpy'}))"
    done = _python("-c", f"import sys\n{textwrap.dedent(code)}\n{report}", folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.rsplit("LOADED", 1)[1].split()


def _all_modules(package: str) -> list[str]:
    (project,) = (project for project in projects() if import_name(project) == package)
    return [module_name(project, file) for file in sources(project) if file.name != "__main__.py"]


def _changes(folder: Path, jobs: dict[str, list[str]], *first: str, head: str = "") -> dict[str, dict[str, object]]:
    """What the imports of each job change, in a process that has imported ``first``."""
    results, place = folder / "results", folder / "empty"
    results.mkdir()
    place.mkdir()
    done = _python("-c", head + PROBE, json.dumps(jobs), json.dumps(first), str(results), folder=place)
    assert done.returncode == 0, done.stderr
    return {job: json.loads((results / job).read_text()) for job in jobs}


def test_importing_every_module_changes_nothing(tmp_path: Path) -> None:
    jobs = {import_name(project): _all_modules(import_name(project)) for project in projects()}
    assert _changes(tmp_path, jobs, *LIBRARIES) == {package: {} for package in jobs}


def test_the_probe_detects_an_effect(tmp_path: Path) -> None:
    tmp_path.joinpath("effect.py").write_text(
        "import logging, os, random, threading\n"
        "os.environ['ACCELERATE_X'] = '1'; random.random(); logging.basicConfig()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    found = _changes(tmp_path, {"it": ["effect"]}, head=f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    assert {"environment", "random generator", "handlers", "threads"} <= set(found["it"])


@pytest.mark.parametrize("package", ["accel", "accel_state", "accel_data", "accel_monitor", "accel_track"])
def test_importing_a_package_does_not_import_torch(package: str, tmp_path: Path) -> None:
    assert _torch_is_imported_by(f"import {package}", tmp_path) == []


def test_an_accelerator_for_one_process_does_not_load_what_shards_models(tmp_path: Path) -> None:
    """torch.distributed.tensor and FSDP take a second to import: no script that shards nothing waits for them."""
    code = """
        import accel, inspect
        assert not hasattr(accel, "no_such_module") and not hasattr(accel, "_torch_compat")
        accel.Accelerator(cpu=True)
        late = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"}
        assert not late & set(sys.modules)
        # Submodules are attributes that are imported when they are used.
        assert "accel.utils" not in sys.modules
        accel.utils.set_seed(1)
        assert accel.state.PartialState().num_processes == 1 and accel.utils.operations.gather
        from accel.utils.tqdm import tqdm
        assert list(accel.utils.tqdm([1, 2], disable=True)) == [1, 2]
        assert inspect.signature(accel.utils.tqdm) == inspect.signature(tqdm)
    """
    assert "torch.nn" in _torch_is_imported_by(code, tmp_path)


def test_the_launcher_needs_torch_only_to_start_several_processes(tmp_path: Path) -> None:
    # accel_launch.elastic builds on torch's own launcher, and is imported when there is something to start; the
    # doctor's ranks are started.
    starts = ("accel_launch.elastic", "accel_launch.doctor.ranks")
    modules = [name for name in _all_modules("accel_launch") if not name.startswith(starts)]
    assert (
        _torch_is_imported_by(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)", tmp_path)
        == []
    )


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    """Of every command, in one interpreter: what one of them imports stays."""
    code = """
        from accel_launch.cli import COMMANDS, main
        assert {"launch", "doctor", "estimate-memory", "to-fsdp2", "checkpoint", "plan", "track"} <= set(COMMANDS)
        for words in ([], *([command] for command in COMMANDS), ["track", "show"]):
            try:
                code = main([*words, "--help"])
            except SystemExit as end:
                code = end.code
            assert not code, words
    """
    assert _torch_is_imported_by(code, tmp_path) == []


@pytest.mark.parametrize("command", ["accel", "accel-launch"])
def test_the_commands_are_installed(command: str, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / command
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout
