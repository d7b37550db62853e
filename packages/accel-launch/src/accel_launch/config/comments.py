"""The comments of a YAML file, carried over to a text that says the same under other keys or in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Comments:
    """What a file says beside its values.

    Attributes:
        head: lines at the top, which a blank line parts from the first key.
        above: lines before a key, by the key (``section.key`` where it is nested).
        beside: comment behind a key's value, by the key.
        tail: lines after the last key.
    """

    head: list[str] = field(default_factory=list)
    above: dict[str, list[str]] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.head or self.above or self.beside or self.tail)


def read_comments(text: str) -> Comments:
    """The comments of a text that is valid YAML."""
    keys = [(key, line) for key, line, _ in _keys(text)]
    found, lines = Comments(), text.splitlines()
    for number, column in _places(text):
        comment = lines[number][column:]
        if lines[number][:column].strip():
            before = [key for key, line in keys if line <= number]
            if before:
                found.beside[before[-1]] = " ".join(filter(None, [found.beside.get(before[-1]), comment]))
                continue
        after = next(((key, line) for key, line in keys if line > number), None)
        if after is None:
            found.tail.append(comment)
        elif after[0] == keys[0][0] and not all(line.strip() for line in lines[number : after[1]]):
            found.head.append(comment)
        else:
            found.above.setdefault(after[0], []).append(comment)
    return found


def write_comments(text: str, comments: Comments, renamed: Mapping[str, str]) -> str:
    """A text with comments.

    Args:
        text: YAML, a key to a line.
        comments: of another text.
        renamed: how its keys are called in this one, where they are called otherwise.

    What belongs to a key that is not there goes to the end.
    """
    lines, places = text.splitlines(), {key: (line, column) for key, line, column in _keys(text)}
    moved = {key: renamed.get(key, key) for key in (*comments.above, *comments.beside)}
    last = {line for line, _ in places.values()} | {len(lines)}
    for key, comment in comments.beside.items():
        if moved[key] in places and places[moved[key]][0] + 1 in last:
            line = places[moved[key]][0]
            lines[line] += ("  " if "  #" not in lines[line] else " ") + comment
        elif moved[key] in places:
            # Its value goes on in the next line.
            comments.above.setdefault(key, []).append(comment)
        else:
            comments.tail.append(comment)
    blocks: dict[int, list[str]] = {}
    for key, above in comments.above.items():
        if moved[key] in places:
            line, column = places[moved[key]]
            blocks.setdefault(line, []).extend(" " * column + comment for comment in above)
        else:
            comments.tail.extend(above)
    head = [*comments.head, ""] if comments.head else []
    body = [part for number, line in enumerate(lines) for part in (*blocks.get(number, ()), line)]
    return "\n".join([*head, *body, *comments.tail]) + "\n"


def _keys(text: str) -> list[tuple[str, int, int]]:
    """Every key with its line and column, in the order of the text."""
    import yaml

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, int, int]]:
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line, key.start_mark.column
            if isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{name}.")

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return list(walk(root, "")) if root is not None else []


def _places(text: str) -> list[tuple[int, int]]:
    """Line and column of each comment: a # at the beginning or after a space, outside of values."""
    import yaml

    inside = [
        (token.start_mark.index, token.end_mark.index)
        for token in yaml.scan(text, Loader=yaml.SafeLoader)
        if isinstance(token, yaml.ScalarToken)
    ]
    found, start = [], 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        for column, character in enumerate(line):
            place = start + column
            begins = character == "#" and (column == 0 or line[column - 1].isspace())
            if begins and not any(first <= place < last for first, last in inside):
                found.append((number, column))
                break
        start += len(line)
    return found
