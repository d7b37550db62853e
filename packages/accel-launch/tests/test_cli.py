"""The command ``accel``: help, version, commands of other packages, and no torch anywhere in it."""

from __future__ import annotations

import re

import pytest

from accel_launch.parser import CommandLine, parse
from accel_state.options import load_groups
from accel_state.registry import Registry

# Several commands in one interpreter: what one of them imports stays.
LIGHT = """
import sys
from accel_launch.cli import main
def check(commands, *heavy):
    for words in commands:
        try:
            code = main(words.split())
        except SystemExit as error:
            code = error.code
        assert not code, (words, code)
        found = [name for name in heavy if name in sys.modules]
        assert not found, (words, found)
check(["--help", "", "--version", "launch --help", "launch -h"], "torch", "numpy", "psutil", "yaml")
config = ["config --help", "config show", "config show --help", "config default --config_file new.yaml", "env --help"]
check(config, "torch", "numpy", "questionary")
"""


def test_commands_that_start_nothing_import_nothing_heavy(shell) -> None:
    result = shell.python(LIGHT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and not result.stderr


def test_import_is_light_and_changes_no_variable(shell) -> None:
    result = shell.python("""
        import os, sys
        before = dict(os.environ)
        import accel_launch
        assert accel_launch.__version__ == "1.0.0"
        assert {"launch", "debug_launcher", "notebook_launcher", "LaunchError"} <= set(accel_launch.__all__)
        accel_launch.debug_launcher, accel_launch.notebook_launcher, accel_launch.launch
        assert "torch" not in sys.modules and dict(os.environ) == before
    """)
    assert result.returncode == 0, result.stderr


def test_help_lists_commands_and_options(shell) -> None:
    top = shell.call("--help")
    assert top.returncode == 0 and re.search(
        r"^  launch +start a script on one or many processes", top.stdout, re.MULTILINE
    )
    help_text = shell.call("launch", "--help")
    assert help_text.returncode == 0
    for word in ("--num_processes N", "--module, -m", "OMP_NUM_THREADS", "--cpu"):
        assert word in help_text.stdout
    assert "--num-processes" not in help_text.stdout, "the spelling with dashes works, and is not listed twice"


def test_version(shell) -> None:
    assert shell.call("--version").stdout == "accel-launch 1.0.0\n"


def test_unknown_command(shell) -> None:
    result = shell.call("lauch", "x.py")
    assert result.returncode == 2
    assert result.stderr == "accel: error: 'lauch' is not a command. Did you mean launch? `accel --help` lists them.\n"


@pytest.mark.parametrize(
    ("command", "package"), [("checkpoint", "accel-checkpoint"), ("track", "accel-track"), ("plan", "'accel[plan]'")]
)
def test_a_command_of_a_package_that_is_not_installed(shell, monkeypatch, command, package) -> None:
    builtin = {"launch": "accel_launch.commands.launch:COMMAND"}
    monkeypatch.setattr("accel_launch.cli.COMMANDS", Registry("command", builtin))
    result = shell.call(command, "list", ".")
    assert result.returncode == 2 and f"`accel {command}`" in result.stderr
    assert result.stderr.endswith(f"Run: pip install {package}\n")


def test_a_command_in_the_place_of_a_script(shell) -> None:
    result = shell.call("launch", "config", "show")
    assert result.returncode == 2 and result.stderr.endswith("For the command: accel config.\n"), result.stderr


def install_command(
    shell, name: str, module: str, text: str, group: str = "accel.commands", attribute: str = "COMMAND"
) -> None:
    """The installed metadata of a package with an entry point."""
    shell.write(f"{module}.py", text)
    info = shell.folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")


def test_a_broken_plugin_command_does_not_affect_others(shell) -> None:
    install_command(
        shell,
        "greet",
        "greeter",
        """
        from accel_state.command import Command
        from accel_state.errors import ConfigurationError
        def run(arguments):
            if arguments == ["bad"]:
                raise ConfigurationError("no such greeting:\\n bad")
            print("hello", *arguments)
            return 3
        COMMAND = Command("greet somebody", run)
    """,
    )
    install_command(shell, "broken", "broken_package", "raise RuntimeError('half installed')\n")
    text = re.sub(" +", " ", shell.accel("--help").stdout)
    assert "greet greet somebody" in text and "broken (cannot be loaded: half installed)" in text and "launch" in text
    result = shell.accel("greet", "you")
    assert (result.stdout, result.returncode) == ("hello you\n", 3)
    result = shell.accel("greet", "bad")
    assert (result.stderr, result.returncode) == ("accel greet: error: no such greeting: bad\n", 2)


def test_other_packages_add_launchers(shell) -> None:
    text = """
        from accel_launch.launchers.base import Launcher
        class Printer(Launcher):
            def accepts(self, plan):
                return plan.num_processes == 3
            def run(self, plan):
                print("would start", plan.entrypoint.command(["python"]), plan.environment["ACCELERATE_USE_CPU"])
                return 4
    """
    install_command(shell, "printer", "printers", text, "accel.launchers", "Printer")
    shell.write("s.py", "print('ran')")
    result = shell.accel("launch", "--cpu", "--num_processes", "3", "s.py", "x")
    assert (result.stdout, result.returncode) == ("would start ['python', 's.py', 'x'] true\n", 4), result.stderr
    assert shell.accel("launch", "--cpu", "--num_processes", "1", "s.py").stdout == "ran\n"


def test_every_spelling_of_every_flag_is_parsed() -> None:
    """The parser has only the flags of the command line; a short one may have its value attached."""
    for opt in [opt for group in load_groups() for opt in group.options()]:
        for flag in (*opt.flags, *opt.undo_flags):
            alone = flag in opt.undo_flags or (opt.is_flag and not flag.startswith("--"))
            expected = "false" if flag in opt.undo_flags else "true" if alone else "1"
            word = flag if alone else f"{flag}=1" if flag.startswith("--") else f"{flag}1"
            assert parse([word, "s.py", flag]) == CommandLine({opt.name: expected}, "s.py", [flag]), word
