"""The page of ``accel goodput --html``: one file without scripts or references to other files. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .ledger import Cause, Entry, Ledger
from .report import clock, conclusions, duration, headline, shares

# Colours that can be told apart with colour blindness, light and dark.
_COLORS = {
    Cause.PRODUCTIVE: "#2a9d5c",
    Cause.AGAIN: "#c23b75",
    Cause.LAUNCH: "#d3cbf3",
    Cause.IMPORTS: "#b09fe6",
    Cause.STARTUP: "#8f7ad6",
    Cause.COMPILING: "#5a5fc4",
    Cause.DATA: "#e08a1e",
    Cause.WAITING: "#d9c22b",
    Cause.STRAGGLER: "#a8700f",
    Cause.SAVING: "#2f86c9",
    Cause.LOADING: "#6fb7e8",
    Cause.EVALUATION: "#1fa3a3",
    Cause.OTHER: "#93a1ad",
    Cause.EXIT: "#6a55b5",
    Cause.LAUNCHER: "#4a3a85",
    Cause.DEAD: "#3a3f46",
    Cause.BETWEEN: "#b8a99a",
}
_ALONE = frozenset((Cause.DEAD, Cause.BETWEEN))
_MAX_ROWS = 64
_SPANS = 240
_STYLE = """
:root { color-scheme: light dark; --text: #1c2127; --soft: #5c6670; --line: #d8dde2; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ec; --soft: #9aa5b0; --line: #363d45; --page: #14181c; }
  .dead { stroke: #6c757f; stroke-width: .5; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto;
  max-width: 1100px; padding: 24px 16px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; shape-rendering: crispEdges; } .bar { height: 36px; border-radius: 4px; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .6em; text-indent: 0; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; max-width: 560px; margin: 12px 0; }
td, th { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); font-weight: 500; }
td.cause { padding-left: 1.4em; text-indent: -1.4em; }
.row { display: grid; grid-template-columns: 5.5em 1fr; align-items: center; gap: 8px; font-size: .8rem; }
.row svg { height: 18px; } .ends { display: flex; justify-content: space-between; padding-left: calc(5.5em + 8px); }
"""


def page(ledger: Ledger) -> str:
    """Return the page as text."""
    return "\n".join(_lines(ledger)) + "\n"


def _lines(ledger: Ledger) -> Iterator[str]:
    ranks = len(ledger.entries)
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Goodput of {escape(str(ledger.run.directory))}</title><style>{_STYLE}</style></head><body>"
    text, _, detail = headline(ledger).partition(":")
    yield f"<h1>{escape(text.capitalize())}</h1><p>{escape(detail.strip().capitalize())}</p>"
    begin, end = clock(ledger.run.begin), clock(ledger.run.end)
    directory = escape(str(ledger.run.directory.resolve()))
    yield f'<p class="soft">{directory}: {begin} to {end}, {duration(ledger.wall)}</p>'
    yield "<h2>What the time was spent on</h2>"
    yield '<svg class="bar" viewBox="0 0 1000 36" preserveAspectRatio="none" aria-label="share of each cause">'
    yield from _stack(shares(ledger), 0.0, 1000.0, 36)
    yield "</svg><table><tr><th>cause</th><th>time per rank</th><th>share</th></tr>"
    for cause, seconds in shares(ledger):
        key = f'<span class="key" style="background:{_COLORS[cause]}"></span>{cause.value}'
        time, share = duration(seconds / ranks), f"{seconds / ledger.total:.1%}"
        yield f'<tr><td class="cause">{key}</td><td>{time}</td><td>{share}</td></tr>'
    yield f"<tr><td>total</td><td>{duration(ledger.total / ranks)}</td><td>100.0%</td></tr></table>"
    for sentence in conclusions(ledger):
        yield f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>"
    yield "<h2>Timeline</h2>"
    yield from _timeline(ledger)
    for note in ledger.run.notes:
        yield f'<p class="soft">Note: {escape(note)}</p>'
    yield "</body></html>"


def _timeline(ledger: Ledger) -> Iterator[str]:
    slots = sorted(ledger.entries)
    replicas = {slot[0] for slot in slots}
    begin = ledger.run.begin
    length = max(ledger.wall, 1e-9)
    for slot in slots[:_MAX_ROWS]:
        name = f"rank {slot[1]}" if len(replicas) == 1 else f"{slot[0]}, rank {slot[1]}"
        yield f'<div class="row"><span>{name}</span><svg viewBox="0 0 1000 18" preserveAspectRatio="none">'
        for entry in _merged(ledger.entries[slot], length / _SPANS):
            left = (entry.begin - begin) / length * 1000
            yield from _stack(list(entry.seconds.items()), left, (entry.end - entry.begin) / length * 1000, 18)
        yield "</svg></div>"
    yield f'<div class="ends soft"><span>0 s</span><span>{duration(ledger.wall)}</span></div>'
    if len(slots) > _MAX_ROWS:
        yield f'<p class="soft">The first {_MAX_ROWS} of {len(slots)} ranks.</p>'


def _merged(entries: list[Entry], span: float) -> Iterator[Entry]:
    """Neighbouring entries joined until they are wide enough to be seen. Time in which no process ran is not joined."""
    current: Entry | None = None
    for entry in entries:
        alone = not _ALONE.isdisjoint(entry.seconds) or Cause.IMPORTS in entry.seconds
        if current is None or alone or current.end - current.begin >= span or not _ALONE.isdisjoint(current.seconds):
            if current is not None:
                yield current
            current = entry
            continue
        seconds = dict(current.seconds)
        for cause, amount in entry.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + amount
        current = Entry(current.begin, entry.end, seconds)
    if current is not None:
        yield current


def _stack(parts: list[tuple[Cause, float]], left: float, width: float, height: int) -> Iterator[str]:
    total = sum(seconds for _, seconds in parts)
    order = list(Cause)
    for cause, seconds in sorted(parts, key=lambda part: order.index(part[0])):
        share = width * seconds / total if total else 0.0
        if share > 0.01:
            kind = ' class="dead"' if cause is Cause.DEAD else ""
            yield (
                f'<rect{kind} x="{left:.2f}" y="0" width="{share:.2f}" height="{height}" fill="{_COLORS[cause]}">'
                f"<title>{cause.value}: {duration(seconds)}</title></rect>"
            )
            left += share
