"""Changes the content of a YAML text and keeps its comments, order and quoting, with ruamel.yaml."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

_INDENT = 2
_HEADER = "%YAML 1.1\n---\n"


def has_comments(text: str) -> bool:
    """Whether a YAML text seems to contain a comment."""
    return any(line.lstrip().startswith("#") or " #" in line for line in text.splitlines())


def rewrite(text: str, content: Mapping[str, Any], renamed: Mapping[str, str]) -> str | None:
    """Change a YAML text so that it holds ``content``.

    New keys come last in their section. Comments above and behind a key stay with it, also under its new name; those of
    a removed key move to the end of the text.

    Args:
        text: a YAML mapping.
        content: what it must hold.
        renamed: new name by old name of keys, each as ``key`` or ``section.key``.

    Returns:
        The new text; None if ruamel.yaml cannot write one that holds exactly ``content``.
    """
    import yaml
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    editor = YAML()
    editor.version = (1, 1)  # as PyYAML reads it: `no` is false, so the string is quoted
    editor.preserve_quotes = True
    editor.width = 4096
    try:
        new = _Rewriter(editor.load(text) or CommentedMap(), renamed).rewrite(editor, content)
        return new if yaml.safe_load(new) == content else None
    except Exception:
        # Valid but unusual files (flow mappings over several lines, say) raise more than ruamel.yaml's own errors.
        return None


class _Rewriter:
    """Edits one document."""

    def __init__(self, document: CommentedMap, renamed: Mapping[str, str]) -> None:
        self._document, self._renamed = document, renamed
        self._removed: dict[str, list[Any]] = {}
        """Comments of removed keys, by the keys' new names."""
        self._tail = self._attach_comments_to_next_key()

    def rewrite(self, editor: YAML, content: Mapping[str, Any]) -> str:
        """Change the document, and return its text."""
        self._remove(self._document, content, "")
        self._add(self._document, content, "")
        tail = [token.value for item in self._removed.values() for token in (*(item[1] or ()), item[2]) if token]
        stream = io.StringIO()
        editor.dump(self._document, stream)
        lines = [line.strip() for line in "".join([self._tail, *tail]).splitlines()]
        end = "\n".join(lines).rstrip()
        return stream.getvalue().removeprefix(_HEADER) + (f"{end}\n" if end else "")

    def _attach_comments_to_next_key(self) -> str:
        """Move comments from behind a key, where ruamel.yaml keeps them, to the key below; return those at the end."""
        from ruamel.yaml.error import CommentMark
        from ruamel.yaml.tokens import CommentToken

        pending = ""
        for mapping, key, depth in list(_keys(self._document, 0)):
            comments = mapping.ca.items.get(key)
            if pending:
                comments = mapping.ca.items.setdefault(key, [None, None, None, None])
                mark = CommentMark(depth * _INDENT)
                comments[1] = [CommentToken(f"{line.strip()}\n", mark, None) for line in pending.splitlines()]
            pending = ""
            if comments is None:
                continue
            if comments[2] is not None:
                same_line, _, pending = comments[2].value.partition("\n")
                comments[2].value = f"{same_line}\n"
                if not same_line:
                    comments[2] = None
            if comments[3]:
                pending += "".join(token.value for token in comments[3])
                comments[3] = mapping[key].ca.comment = None
        return pending

    def _remove(self, mapping: CommentedMap, wanted: Mapping[str, Any], prefix: str) -> None:
        """Rename keys, and remove those that are not wanted."""
        for key in list(mapping):
            if key in wanted:
                if isinstance(mapping[key], dict):
                    inner = wanted[key] if isinstance(wanted[key], dict) else {}
                    self._remove(mapping[key], inner, f"{prefix}{key}.")
                continue
            new = self._renamed.get(f"{prefix}{key}", f"{prefix}{key}")
            comments = mapping.ca.items.pop(key, None)
            last = new.removeprefix(prefix)
            if last in wanted and last not in mapping:
                mapping.insert(list(mapping).index(key), last, mapping[key])
                if comments:
                    mapping.ca.items[last] = comments
            else:
                if isinstance(mapping[key], dict):
                    self._remove(mapping[key], {}, f"{prefix}{key}.")
                if comments:
                    self._removed[new] = comments
            del mapping[key]

    def _add(self, mapping: CommentedMap, wanted: Mapping[str, Any], prefix: str) -> None:
        """Set the wanted values, with the comments of keys that were removed elsewhere."""
        from ruamel.yaml.error import CommentMark

        for key, value in wanted.items():
            if isinstance(value, dict) and (key not in mapping or isinstance(mapping[key], dict)):
                if key not in mapping:
                    mapping[key] = type(mapping)()
                self._add(mapping[key], value, f"{prefix}{key}.")
            elif key not in mapping or mapping[key] != value:
                mapping[key] = value
            comments = self._removed.pop(f"{prefix}{key}", None)
            if comments and key not in mapping.ca.items:
                for token in comments[1] or ():
                    token.start_mark = CommentMark(_INDENT * prefix.count("."))
                mapping.ca.items[key] = comments


def _keys(mapping: Any, depth: int) -> Iterator[tuple[CommentedMap, Any, int]]:
    """Every key in the order of the text, with its mapping and depth."""
    for key, value in mapping.items():
        yield mapping, key, depth
        if isinstance(value, dict):
            yield from _keys(value, depth + 1)
