"""mkdocs hook: parts of pages that are generated from the code, and repairs to the HTML of docstrings.

`<!-- commands -->`: the help of every command. `<!-- variables -->`: the environment variables of all options.
`<!-- torchrun -->`: what becomes of each option of torchrun.
`<!-- facts -->`: the version, the license, and a link to the repository if `ACCEL_URL` names it.
`<!-- index: accel.utils -->`: a table of the names of a module, and the documentation of those that no package's page
has.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

_COMMANDS = re.compile(r"^<!-- commands -->$", re.MULTILINE)
_VARIABLES = re.compile(r"^<!-- variables -->$", re.MULTILINE)
_TORCHRUN = re.compile(r"^<!-- torchrun -->$", re.MULTILINE)
_FACTS = re.compile(r"^<!-- facts -->$", re.MULTILINE)
_INDEX = re.compile(r"^<!-- index: ([\w.]+) -->$", re.MULTILINE)
_MODULES = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_EXPORTS = re.compile(r"^<!-- exports: ([\w.]+) -->$", re.MULTILINE)
# Docstrings use the roles of reStructuredText: :meth:`~accel.Accelerator.prepare`.
_ROLE = re.compile(r":(?:py:)?(?:meth|func|class|mod|data|attr|exc|obj):(?=<code)(<code[^>]*>)~?")
# A default that means "not given".
_UNSET = re.compile(r'(?:<span class="n">\w+</span><span class="o">\.</span>)?<span class="n">UNSET</span>')
_AVAILABLE = re.compile(r"is_\w+_available")
_WIDTH = "88"


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Replace the markers of a page; called by mkdocs."""
    root = Path(config.config_file_path).parent
    markdown = _FACTS.sub(lambda _: facts(root, config.repo_url), markdown)
    if any(mark.search(markdown) for mark in (_COMMANDS, _VARIABLES, _TORCHRUN, _INDEX)):
        with _sources(root):
            markdown = _COMMANDS.sub(lambda _: commands(), markdown)
            markdown = _VARIABLES.sub(lambda _: variables(), markdown)
            markdown = _TORCHRUN.sub(lambda _: torchrun(), markdown)
            markdown = _INDEX.sub(lambda match: index(root, match[1]), markdown)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Drop what mkdocstrings leaves of roles, and name the sentinel of arguments; called by mkdocs."""
    return _UNSET.sub("...", _ROLE.sub(r"\1", html))


def facts(root: Path, address: str | None) -> str:
    """Return the version of accel, a link to its repository, and its license, in one line.

    Args:
        root: the directory of the repository.
        address: where the repository is published; the repository itself names no address.
    """
    project = root.joinpath("packages", "accel", "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'(?m)^version = "(.+)"$', project)
    return " · ".join([f"Version {version}", *([f"[Repository]({address})"] if address else []), "Apache-2.0"])


@contextlib.contextmanager
def _sources(root: Path) -> Any:
    paths = [str(path) for path in sorted(root.glob("packages/*/src"))]
    sys.path[:0] = paths
    try:
        yield
    finally:
        del sys.path[: len(paths)]


def commands() -> str:
    """Return one section for each command with its help."""
    from accel_launch.command import COMMANDS

    return "\n\n".join(f"## accel {name}\n\n```text\n{help_of(name)}\n```" for name in COMMANDS.names())


def help_of(name: str) -> str:
    """Return what `accel NAME --help` prints, in lines of at most 88 characters."""
    from accel_launch.cli import main

    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([name, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return printed.getvalue().rstrip()


def variables() -> str:
    """Return a table of the variables of all options, by name."""
    from accel_state.options import load_groups

    rows = sorted({(opt.env, opt.flags[0], opt.help) for group in load_groups() for opt in group.options() if opt.env})
    cells = [f"| `{env}` | `{flag}` | {text} |".replace("\\", "\\\\") for env, flag, text in rows]
    return "\n".join(["| variable | option | meaning |", "| --- | --- | --- |", *cells])


@cache
def torchrun() -> str:
    """Return a table of torchrun's options, from its parser, with ours of the same name or the answer to it."""
    from torch.distributed.run import get_args_parser

    from accel_launch.torchrun_options import UNUSED
    from accel_state.options import load_groups

    taken = {flag: opt for group in load_groups() for opt in group.options() for flag in opt.flags}
    rows = []
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        flag = next(flag for flag in action.option_strings if flag.startswith("--"))
        here = f"not taken. {UNUSED[flag]}" if flag in UNUSED else f"`{taken[flag].flags[0]}`. {taken[flag].help}"
        rows.append(f"| `{flag}` | {here} |")
    return "\n".join(["| torchrun | here |", "| --- | --- |", *rows])


def _documented(root: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the pages of the packages document: names, as `accel_state.gather`, and whole modules."""
    sys.path.insert(0, str(root / "docs"))
    try:
        from exports import _exports
    finally:
        sys.path.pop(0)
    names: set[str] = set()
    modules: set[str] = set()
    for page in root.glob("docs/packages/*.md"):
        text = page.read_text(encoding="utf-8")
        modules.update(_MODULES.findall(text))
        for module in _EXPORTS.findall(text):
            names.update(f"{module}.{name}" for name in _exports(root, module)[0])
    return frozenset(names), frozenset(modules)


def index(root: Path, module: str) -> str:
    """Return a table of the public names of a module, and the documentation of those that no package's page has."""
    names, modules = _documented(root)
    documented = {name.rpartition(".")[2]: name for name in sorted(names, key=len, reverse=True)}
    source = importlib.import_module(module)
    rows, missing = [], []
    for name in sorted(source.__all__, key=str.lower):
        value = getattr(source, name)
        summary = _summary(value)
        link = f"`{name}`"
        if _AVAILABLE.fullmatch(name):
            pass  # the pages list these without an entry of their own
        elif name in documented:
            link = f"[`{name}`][{documented[name]}]"
        elif (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("accel"):
            path = f"{value.__module__}.{value.__qualname__}"
            if value.__module__ not in modules:
                missing.append(path)
            link = f"[`{name}`][{path}]"
        rows.append(f"| {link} | {summary} |")
    table = "\n".join(["| name | |", "| --- | --- |", *rows])
    return "\n\n".join([table, "## Other names", *(f"::: {name}" for name in dict.fromkeys(missing))])


def _summary(value: Any) -> str:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"`{value!r}`".replace("|", "\\|") if isinstance(value, (str, int, tuple)) else type(value).__name__
    text = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return re.sub(r":\w+:(`)~?", r"\1", text).replace("``", "`")
