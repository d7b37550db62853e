"""What is started: a script, a module or an executable, checked before any process is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from accel_state.errors import ConfigurationError
from accel_state.options import ScriptOptions

_BINARY_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"MZ")


@dataclass(frozen=True)
class Target:
    """What is started.

    Attributes:
        kind: "script", "module" or "executable".
        name: path, dotted name, or path of the executable.
        args: its arguments.
    """

    kind: str
    name: str
    args: tuple[str, ...]

    def command(self, interpreter: Sequence[str]) -> list[str]:
        """The command that runs it in one process.

        Args:
            interpreter: Python with its options.
        """
        prefix = {
            "script": [*interpreter, self.name],
            "module": [*interpreter, "-m", self.name],
            "executable": [self.name],
        }
        return [*prefix[self.kind], *self.args]


def find_target(options: ScriptOptions, name: str, args: Sequence[str]) -> Target:
    """Check that the target exists and can be started.

    Raises:
        ConfigurationError: it cannot; the message says what to do.
    """
    if options.module and options.no_python:
        raise ConfigurationError(
            "-m and --no_python contradict each other: a module is run by python. Give one of them."
        )
    if options.module:
        _check_module(name)
        return Target("module", name, tuple(args))
    if options.no_python:
        return Target("executable", _find_executable(name), tuple(args))
    _check_script(name)
    return Target("script", name, tuple(args))


def _check_script(name: str) -> None:
    path = Path(name)
    if not path.exists():
        hint = f" For a module: accel launch -m {name}." if not name.endswith(".py") and _is_module(name) else ""
        hint = hint or (f" For a program: accel launch --no_python {name}." if shutil.which(name) else "")
        raise ConfigurationError(f"script {name!r} does not exist (looked in {Path.cwd()}).{hint}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigurationError(f"{name!r} is a folder without __main__.py. Name a script in it.")
    if path.is_file() and not zipfile.is_zipfile(path):
        _check_is_python(path)


def _check_is_python(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ConfigurationError(f"script {str(path)!r} cannot be read: {error.strerror}.") from None
    shebang = head.split(b"\n", 1)[0] if head.startswith(b"#!") else b""
    if (
        head.startswith(_BINARY_MAGIC)
        or b"\0" in head
        or (shebang and b"python" not in shebang and path.suffix != ".py")
    ):
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
        # An import hook of an installed package may raise anything here; the processes would meet the same.
        raise ConfigurationError(
            f"-m {name!r}: looking for the module failed: {type(error).__name__}: {error}"
        ) from None
    if spec is None:
        raise ConfigurationError(f"-m {name!r}: no such module in {Path.cwd()} or in the packages of {sys.executable}.")
    if (
        spec.submodule_search_locations is not None
        and PathFinder.find_spec(f"{name}.__main__", list(spec.submodule_search_locations)) is None
    ):
        raise ConfigurationError(
            f"-m {name!r} is a package without __main__.py, which cannot be run. Name a module of it."
        )


def _is_module(name: str) -> bool:
    try:
        _check_module(name)
    except ConfigurationError:
        return False
    return True


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing anything, its parent packages included: they may import torch, or initialise a
    device.
    """
    top, *rest = name.split(".")
    with _current_folder_first():
        spec = importlib.util.find_spec(top)
    full_name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = f"{full_name}.{part}"
        spec = PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
    return spec


@contextmanager
def _current_folder_first() -> Iterator[None]:
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def _find_executable(name: str) -> str:
    found = shutil.which(name)
    if found is None and Path(name).is_file():
        # As torchrun and env do not: a bare name of a file of this folder is meant as that file.
        found = shutil.which(str(Path(name).absolute()))
        if found is None:
            raise ConfigurationError(f"--no_python {name!r} is not executable. Run: chmod +x {name}")
    if found is None:
        raise ConfigurationError(f"--no_python {name!r}: no such file, and no such program in PATH.")
    return found
