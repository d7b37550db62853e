"""Writes the public addresses of the project into a copy of its packages, before their wheels are built.

    python scripts/project_urls.py PACKAGES --url URL --files URL [--docs URL]

The repository itself names no address: one that is forked or moved keeps no wrong one. `scripts/wheels --url ...` calls
this with a copy of `packages/`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

_LINK = re.compile(r"(?P<text>\]\()(?P<target>[^()\s]+)(?=\))")
_CODE = re.compile(r"```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def urls(name: str, url: str, files: str, docs: str) -> dict[str, str]:
    """Return the entries of ``[project.urls]`` of a package."""
    found = {"Homepage": url, "Issues": f"{url}/issues", "Changelog": f"{files}/packages/{name}/CHANGELOG.md"}
    return {**found, "Documentation": docs} if docs else found


def absolute_links(text: str, name: str, files: str) -> str:
    """Return a README whose relative links are addresses; a package index shows it without the files next to it."""

    def absolute(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        parts: list[str] = []
        for part in PurePosixPath("packages", name, path).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        return f"{match['text']}{files}/{'/'.join(parts)}{mark}{anchor}"

    pieces, end = [], 0
    for code in _CODE.finditer(text):
        pieces += [_LINK.sub(absolute, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, _LINK.sub(absolute, text[end:])])


def write(packages: Path, url: str, files: str, docs: str = "") -> None:
    """Change the pyproject.toml and README.md of every package in a directory."""
    for project in sorted(packages.glob("*/pyproject.toml")):
        name, text = project.parent.name, project.read_text(encoding="utf-8")
        if "[project.urls]" in text:
            raise SystemExit(f"{project} has [project.urls] already: give this a fresh copy of packages/")
        # JSON's strings are TOML's.
        lines = [f"{key} = {json.dumps(value)}" for key, value in urls(name, url, files, docs).items()]
        project.write_text("\n".join([text.rstrip(), "", "[project.urls]", *lines, ""]), encoding="utf-8")
        readme = project.with_name("README.md")
        readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), name, files), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Write the addresses of the project into a copy of its packages.")
    parser.add_argument("packages", type=Path)
    parser.add_argument("--url", required=True, help="the repository, for example https://example.org/team/accel")
    parser.add_argument(
        "--files", required=True, help="its files, for example https://example.org/team/accel/blob/main"
    )
    parser.add_argument("--docs", default="", help="the documentation, if it is published")
    arguments = parser.parse_args(argv)
    addresses = {name: getattr(arguments, name).rstrip("/") for name in ("url", "files", "docs")}
    for name, address in addresses.items():
        if address and not re.match(r"https?://[^/\s]+", address):
            parser.error(f"--{name} {address}: an address begins with https:// and a host")
    write(arguments.packages, **addresses)


if __name__ == "__main__":
    main()
