"""Every command of READMEs and documentation runs, and prints what the page shows.

``accel launch`` runs as in ``forks.py``; ``documented_commands.py`` names the tests that run the other commands.
`scripts/test --all` prints the list with its times.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from documented_commands import DRY_RUN, ELSEWHERE, NOT_RUN, entry
from documents import Command, all_commands, blocks, shows
from forks import run_launched
from workspace import ROOT, metadata, projects

from accel_launch.parser import parse

COMMANDS = [
    command
    for command in all_commands()
    if not any(entry(table, command) for table in (ELSEWHERE, NOT_RUN)) and not command.line.startswith("pip install")
]
PAGES = {page: list(commands) for page, commands in groupby(COMMANDS, lambda command: command.block.page)}
# Commands that show an error.
MAY_FAIL = ("--num_proceses", "a.yaml", "fail.py", "fp61")
# Commands that the launcher itself must run: for its messages, or because it starts something else than a file.
LAUNCHER = (*MAY_FAIL, "--dry_run", "fsdp_use_orig_params", " -m ", "--no_python", "|")
SCRIPT = "import os\nassert int(os.environ.get('RANK', 0)) < int(os.environ.get('WORLD_SIZE', 1))\n"
SUM = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
precision = os.environ["ACCELERATE_MIXED_PRECISION"]
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {total.item()}, precision {precision}")
dist.destroy_process_group()
"""
FAIL = """import os

if os.environ["RANK"] == "1":

    raise ValueError("no such file: labels.csv")
"""
SAVE = """
import torch
from accel import Accelerator
from accel.utils import ProjectConfiguration

configuration = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=configuration)
model = torch.nn.Linear(100, 100)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 100)).sum())
    optimizer.step()
    accelerator.save_state()
"""
SAVE_ALONE = """
import torch
from accel_checkpoint import save

model = torch.nn.Linear(4, 1)
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 100}
save(state, "checkpoints/checkpoint_100", step=100)
"""
FILES = {
    "train.py": SCRIPT,
    "script.py": SCRIPT,
    "package/train.py": SCRIPT,
    "package/module.py": SCRIPT,
    "run.sh": "#!/bin/sh\ntest -n $RANK\n",
    "sum.py": SUM,
    "fail.py": FAIL,
    "hosts": "w0 slots=2\nw1 slots=2\nworker-1 slots=4\n",
    "a.yaml": "distributed_type: FSDP\nuse_deepspeed: true\n",
    "fsdp.yaml": "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n",
}
# Commands that run first, by page.
BEFORE = {
    "docs/guides/checkpoints.md": SAVE,
    "packages/accel/README.md": SAVE,
    "packages/accel-checkpoint/README.md": SAVE_ALONE,
}


def folder_of(page: str, folder: Path) -> None:
    """The files that a page's commands need: its own, those of its Python blocks, and the defaults."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks():
        if block.page == page and re.fullmatch(r"[\w/]+\.\w+", block.title):
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif page == "packages/accel-track/README.md" and "TrackerRun(" in block.text and block.page == page:
            (folder / "own.py").write_text(block.text, encoding="utf-8")


def damage(file: Path) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def run(command: Command, folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    words = command.words
    if words[-1] == "...":
        words[-1] = "train.py"
    if words[0] == "python":  # a launch of one process becomes the script too
        words[:1] = ["accel", "launch", "--cpu", "--num_processes", "1"]
    if entry(DRY_RUN, command) and "--dry_run" not in words:
        words.insert(2, "--dry_run")
    if words[:2] == ["accel", "launch"] and not any(part in shlex.join(words) for part in LAUNCHER):
        settings = parse(words[2:])
        options = words[2 : len(words) - 1 - len(settings.script_args)]
        script = Path(os.path.abspath(settings.script))
        lines = run_launched(script, *settings.script_args, launch=tuple(options), folder=folder)
        return 0, "\n".join(lines), ""
    shims = folder / "bin"
    shims.mkdir(exist_ok=True)
    for name, module in (("accel", "accel_launch"), ("torchrun", "torch.distributed.run")):
        (shims / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n', encoding="utf-8")
        (shims / name).chmod(0o755)
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    line = shlex.join(words) if words != command.words else command.line
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        # Python's teardown races with gloo's threads where torchrun, and not accel, ends the processes.
        if words[0] != "torchrun" or "SIGABRT" not in done.stderr:
            break
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow  # dozens of commands: half a minute on two cores
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    folder_of(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    if page in BEFORE:
        (tmp_path / "before.py").write_text(BEFORE[page], encoding="utf-8")
        run_launched(tmp_path / "before.py", launch=("--cpu", "--num_processes", 1), folder=tmp_path)
    failures, code = [], 0
    for number, command in enumerate(PAGES[page]):
        monkeypatch.setenv("HF_HOME", str(tmp_path / f"home{number}"))  # each without a configuration of the user
        if "contents differ" in command.shown:
            damage(tmp_path / command.shown.partition(":")[0])
        start = time.perf_counter()
        code, *streams = (0, f"{code}\n", "") if command.line == "echo $?" else run(command, tmp_path)
        seconds = time.perf_counter() - start
        record_property("documented run", f"{seconds:6.1f} s  {command.block}: {command.line}")
        if code and not any(part in command.line for part in MAY_FAIL) and "contents differ" not in command.shown:
            failures.append(f"{command}: exit code {code}\n{streams[0][-1000:]}{streams[1][-2000:]}")
        elif command.shown and not any(shows(command.shown, text) for text in (*streams, "".join(streams))):
            failures.append(f"{command}: prints\n{''.join(streams)}\nand the page shows\n{command.shown}")
    assert not failures, "\n\n".join(failures)


def test_outputs_are_compared() -> None:
    assert shows("rank 0: 1.50\nrank 1: ok\n", "rank 1: ok\nrank 0: 1.503\n")
    assert not shows("accuracy 0.90 of 360", "accuracy 0.80 of 360")
    assert not shows("accuracy 0.90 of 360", "accuracy 0.90 of 361")
    assert shows("...\nall 3 files\n...\nend 3.5 s\n", "a\nall 3 files\nb\nc\nend 7.25 s\n")
    assert not shows("all 3 files\n...\nend", "a\nall 3 files\nend")


def test_every_command_is_run_by_a_test() -> None:
    """A command is run above or by the test that a table names, or has the reason why none runs it."""
    tables = {"ELSEWHERE": ELSEWHERE, "DRY_RUN": DRY_RUN, "NOT_RUN": NOT_RUN}
    used: set[tuple[str, str]] = set()
    for command in all_commands():
        for name, table in tables.items():
            key = next((key for key in table if entry({key: "x"}, command)), None)
            if key is not None:
                used.add((name, key))
                break
    unused = {(name, key) for name, table in tables.items() for key in table} - used
    assert not unused, f"no command of the documentation fits {unused}"
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert not name or name in names, test


def extras(distribution: str) -> dict[str, Any]:
    return metadata(ROOT / "packages" / distribution).get("optional-dependencies", {})


def test_what_pip_installs_exists() -> None:
    """Each package of ours that a page installs is one, with that extra; test_wheels.py installs them."""
    ours = {project.name for project in projects()}
    for command in all_commands():
        if command.words[:2] == ["pip", "install"]:
            for word in command.words[2:]:
                match = re.fullmatch(r"(accel[\w-]*)(?:\[(\w+)\])?", word)
                if match:
                    assert match[1] in ours, str(command)
                    assert match[2] is None or match[2] in extras(match[1]), str(command)
