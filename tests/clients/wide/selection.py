"""Which programs are run: every fifth of a shuffled list, or the next one where one cannot be installed or run here."""

from __future__ import annotations

import random
from pathlib import Path

HERE = Path(__file__).parent
SEED = 40
STEP = 5


def shuffled() -> list[str]:
    """The candidates in the order of the draw."""
    names = (HERE / "candidates.txt").read_text(encoding="utf-8").split()
    random.Random(SEED).shuffle(names)
    return names


def replaced() -> dict[str, str]:
    """The programs that were drawn and could not be taken, with the reason of each."""
    lines = (HERE / "replaced.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def drawn() -> list[list[str]]:
    """The programs in fives, each up to the first that was not replaced, or all five if all were."""
    names, reasons = shuffled(), replaced()
    groups = [names[start : start + STEP] for start in range(0, len(names), STEP)]
    return [group[: next((i for i, name in enumerate(group, 1) if name not in reasons), STEP)] for group in groups]


def taken() -> list[str]:
    """The program of each five: the first that was not replaced."""
    return [group[-1] for group in drawn() if group[-1] not in replaced()]


def chosen() -> list[str]:
    """The programs that are run: those taken of which there is a case."""
    return [name for name in taken() if name in with_cases()]


def waiting() -> list[str]:
    """The programs that were taken and have no case yet."""
    return [name for name in taken() if name not in with_cases()]


def with_cases() -> set[str]:
    """The programs of which there is a case, read from the files of cases without importing them."""
    lines = [line for path in HERE.glob("*_cases.py") for line in path.read_text(encoding="utf-8").splitlines()]
    functions = {line.removeprefix("def ").partition("(")[0] for line in lines if line.startswith("def ")}
    return {name for name in shuffled() if function_of(name) in functions}


def function_of(program: str) -> str:
    """The function that is the case of a program."""
    return program.replace("-", "_")


def versions() -> dict[str, str]:
    """The version of each distribution in the environment of the programs."""
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pairs}
