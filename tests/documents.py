"""What the documentation contains: pages, code blocks, commands and links."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workspace import ROOT

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"(?<!\!)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
_IMAGE = re.compile(r"\!\[[^\]]*\]\((?P<target>[^()\s]+)\)")
_COMMENT = re.compile(r"(^|\s+)#(?!\!).*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # relative to the repository
    line: int
    language: str
    title: str
    text: str
    follows: bool  # nothing but blank lines between the block before and this one

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """Every page that a user reads: the documentation, and the READMEs."""
    return tuple(
        [
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            ROOT / "examples" / "README.md",
            *sorted(ROOT.glob("docs/**/*.md")),
            *sorted(ROOT.glob("packages/*/README.md")),
        ]
    )


@cache
def blocks() -> tuple[Block, ...]:
    """The fenced blocks of all pages, in order."""
    found = []
    for page in pages():
        text, end = page.read_text(encoding="utf-8"), -1
        for match in _BLOCK.finditer(text):
            language, _, rest = match["info"].strip().partition(" ")
            title = _TITLE.search(rest)
            found.append(
                Block(
                    page=str(page.relative_to(ROOT)),
                    line=text.count("\n", 0, match.start()) + 1,
                    language=language,
                    title=title[1] if title else "",
                    text=textwrap.dedent(match["body"]),
                    follows=end >= 0 and not text[end : match.start()].strip(),
                )
            )
            end = match.end()
    return tuple(found)


@dataclass(frozen=True)
class Command:
    """A command of a page, and the lines that the page shows below it."""

    block: Block
    line: str  # without comments and continuations
    shown: str

    @property
    def words(self) -> list[str]:
        """The words of the line, as a shell splits them."""
        return shlex.split(self.line)

    def __str__(self) -> str:
        return f"{self.block}: {self.line}"


@cache
def all_commands() -> tuple[Command, ...]:
    """The commands of all shell blocks and transcripts."""
    found = []
    for block in blocks():
        text = re.sub(r"\\\n\s*", " ", block.text)
        if block.language == "bash":
            lines = [(line, "") for line in text.splitlines()]
        elif block.language == "console" or (block.language == "text" and text.startswith("$ ")):
            lines = [part.partition("\n")[::2] for part in ("\n" + text).split("\n$ ")[1:]]
        else:
            continue
        for line, shown in lines:
            line = _COMMENT.sub("", line).strip()
            if line:
                found.append(Command(block, re.sub(r"\s+", " ", line), shown))
    return tuple(found)


def commands() -> list[tuple[Block, list[str]]]:
    """The commands of all shell blocks and transcripts, as words."""
    return [(command.block, command.words) for command in all_commands()]


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, code blocks excluded."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", "``", text)
    return [match["target"] for pattern in (_LINK, _IMAGE) for match in pattern.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts make them."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE):
        if own := re.search(r" \{ #([\w-]+) \}$", title):
            found.add(own[1])
            continue
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", title)).strip().lower()
        anchor = re.sub(r"[-\s]+", "-", plain)
        number = 0
        while (name := f"{anchor}_{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


_TOKEN = re.compile(r"\.\.\.|[a-f0-9]{16}|\d+(?:\.\d+)?|\s+|[^\W\d]+|.")
_FRACTION = re.compile(r"\d+\.\d+")
_NEAR = {"rel_tol": 0.01, "abs_tol": 0.02}
# What differs from machine to machine; both sides are replaced.
_MASKS = [
    (r"\b[a-f0-9]{16}\b", "SHA"),
    (r"[^\s'\"]*/(?=\w+\.py\b|python)", ""),  # directories
    (r"python3?(\.\d+)?(?=\s)( -[BEIsu]+)*", "python"),
    (r"\b\d+(\.\d+)? (ms|s)\b", "SECONDS"),
    (r"\bon \w[\w.-]*, pid \d+", "PROCESS"),
    (r'"_time": [\d.]+', "TIME"),
]


def shows(shown: str, printed: str) -> bool:
    """Whether a page shows what a command printed: "..." stands for anything, numbers may differ by one percent.

    Ranks print in any order.
    """
    for pattern, name in _MASKS:
        shown, printed = re.sub(pattern, name, shown), re.sub(pattern, name, printed)
    if "..." in shown:
        parts, rest = [_tokens(part) for part in shown.split("...")], _tokens(printed)
        for number, part in enumerate(parts):
            starts = range(len(rest) - len(part) + 1) if number else range(1)
            at = next((at for at in starts if _same(part, rest[at : at + len(part)])), None)
            if at is None:
                return False
            rest = rest[at + len(part) :]
        return not parts[-1] or not rest
    lines = sorted(map(_tokens, shown.splitlines())), sorted(map(_tokens, printed.splitlines()))
    return _same(_tokens(shown), _tokens(printed)) or (len(lines[0]) == len(lines[1]) and all(map(_same, *lines)))


def _tokens(text: str) -> list[str]:
    return [token for token in _TOKEN.findall(text) if not token.isspace()]


def _same(shown: list[str], printed: list[str]) -> bool:
    return len(shown) == len(printed) and all(
        left == right
        or (all(map(_FRACTION.fullmatch, (left, right))) and math.isclose(float(left), float(right), **_NEAR))
        for left, right in zip(shown, printed, strict=True)
    )
