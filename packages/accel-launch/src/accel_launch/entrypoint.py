"""What is launched: a script, a module or an executable. It is checked before any process starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.options.launch import ScriptOptions

from .command import COMMANDS

_BINARY_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"MZ")
WORKER: Path = Path(__file__).parent / "elastic" / "start_worker.py"
"""The program that runs the script of a rank."""


@dataclass(frozen=True)
class Entrypoint:
    """What each process runs."""

    kind: str  # "script", "module" or "executable"
    name: str  # path, dotted name, or path of the executable
    args: tuple[str, ...]  # its arguments

    def command(self, interpreter: Sequence[str]) -> list[str]:
        """Return the command that runs it in one process, with this Python and its options."""
        if self.kind == "executable":
            return [self.name, *self.args]
        return [*interpreter, *(["-m"] if self.kind == "module" else []), self.name, *self.args]


def python_command(*options: str) -> list[str]:
    """Return this interpreter with the options it was started with (``python -O``), then ``options``."""
    # The function that multiprocessing uses for its interpreters.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *options]


def worker_command(entrypoint: Entrypoint, parent: int) -> list[str]:
    """Return the command that runs an entrypoint as a rank, which ends when the process ``parent`` does."""
    return [*python_command(), str(WORKER), entrypoint.kind, str(parent), entrypoint.name, *entrypoint.args]


def find_entrypoint(options: ScriptOptions, name: str, args: Sequence[str]) -> Entrypoint:
    """Check that a script, module or executable exists and can be started."""
    if options.module and options.no_python:
        raise ConfigurationError("-m and --no_python contradict each other: modules run in Python. Give one of them.")
    if options.module:
        _check_module(name)
        return Entrypoint("module", name, tuple(args))
    if options.no_python:
        return Entrypoint("executable", _find_executable(name), tuple(args))
    _check_script(name)
    return Entrypoint("script", name, tuple(args))


def _check_script(name: str) -> None:
    path = Path(name)
    if not path.exists():
        hint = ""
        if name in COMMANDS:
            hint = f" For the command: accel {name}."
        elif not name.endswith(".py") and _is_module(name):
            hint = f" For a module: accel launch -m {name}."
        elif shutil.which(name):
            hint = f" For a program: accel launch --no_python {name}."
        raise ConfigurationError(f"script {name!r} does not exist (looked in {Path.cwd()}).{hint}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigurationError(f"{name!r} is a directory without __main__.py. Give the path of a script.")
    if not path.is_file() or zipfile.is_zipfile(path):
        return
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ConfigurationError(f"script {str(path)!r} cannot be read: {error.strerror}.") from None
    shebang = head.split(b"\n", 1)[0] if head.startswith(b"#!") else b""
    other_interpreter = shebang and b"python" not in shebang and path.suffix != ".py"
    if head.startswith(_BINARY_MAGIC) or b"\0" in head or other_interpreter:
        raise ConfigurationError(
            f"{str(path)!r} is not a Python file. To start an executable: accel launch --no_python {path}."
        )


def _check_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(
            f"-m {name!r} is not a module name: give it without slashes and without .py, such as package.module."
        )
    try:
        spec = _find_spec(name)
    except Exception as error:
        # An import hook of an installed package may raise anything here; the processes would fail the same way.
        raise ConfigurationError(f"-m {name!r}: finding the module failed: {type(error).__name__}: {error}") from None
    if spec is None:
        raise ConfigurationError(f"-m {name!r}: no such module in {Path.cwd()} or in the packages of {sys.executable}.")
    locations = spec.submodule_search_locations
    if locations is not None and PathFinder.find_spec(f"{name}.__main__", list(locations)) is None:
        raise ConfigurationError(
            f"-m {name!r} is a package without __main__.py, which cannot be run. Give one of its modules."
        )


def _is_module(name: str) -> bool:
    try:
        _check_module(name)
    except ConfigurationError:
        return False
    return True


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing its parent packages: they may import torch, or initialise a device."""
    full_name, *rest = name.split(".")
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(full_name)
    finally:
        sys.path.remove(os.getcwd())
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = f"{full_name}.{part}"
        spec = PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
    return spec


def _find_executable(name: str) -> str:
    path = shutil.which(name)
    if path is None and Path(name).is_file():
        # Unlike torchrun and env, a bare name also means a file of the current directory.
        path = shutil.which(str(Path(name).absolute()))
        if path is None:
            raise ConfigurationError(f"--no_python {name!r} is not executable. Run: chmod +x {name}")
    if path is None:
        raise ConfigurationError(f"--no_python {name!r}: no such file, and no such program in PATH.")
    return path
