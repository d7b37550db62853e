"""The tables of components and of ways to start ranks, as docs/install.md has them and as the runs print them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
COMPONENT_HEAD = "| component | size | packages | what ran | with |"
START_HEAD = "| started by | version | rank, local rank, device, shares |"
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Row:
    """What is compared of a component: names and what ran; sizes and versions differ from day to day."""

    packages: frozenset[str]
    ran: frozenset[str]  # with # for numbers
    used: frozenset[str]  # other people's distributions, without versions


def cells(page: str, head: str) -> dict[str, list[str]]:
    """The rows below a head, by their first cell; empty if the page has no such table."""
    lines = page.partition(head)[2].split("\n")[2:]
    found: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip().strip("|").split("|"))
        found[first] = others
    return found


def components(page: str) -> dict[str, Row]:
    """The rows of the table of components."""
    found = {}
    for name, (_, packages, ran, used) in cells(page, COMPONENT_HEAD).items():
        entries = (_NUMBER.sub("#", entry).strip() for entry in ran.split(";"))
        # "5: accel-data, numpy, ..." and "webdataset 1.0.2, torchdata 0.11.0"
        names = (name.strip() for name in packages.partition(":")[2].split(","))
        found[name] = Row(frozenset(names), frozenset(entries), frozenset(used.replace(",", " ").split()[::2]))
    return found


def differences(printed: str, page: str, quick: bool) -> Iterable[str]:
    """What the page says otherwise than a run; a quick run may have less."""
    documented = components(page)
    for name, row in components(printed).items():
        other = documented.get(name)
        if other is None:
            yield f"{name} is not in the table"
            continue
        for part in ("packages", "ran", "used"):
            own, said = getattr(row, part), getattr(other, part)
            missing, gone = own - said, set() if quick and part != "packages" else said - own
            if missing or gone:
                yield f"{name}, {part}: the run has {sorted(missing)}, the page {sorted(gone)}"
    ways, said_ways = cells(printed, START_HEAD), cells(page, START_HEAD)
    for name, (_, result) in ways.items():
        if result != "not installed" and said_ways.get(name, ["", ""])[1] != result:
            yield f"{name}: the run says {result}, the page {said_ways.get(name)}"
