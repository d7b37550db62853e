"""Releases distributions of the workspace, each on its own; scripts/release describes the command.

Everything is built, checked and tested for all of them before the first is tagged or uploaded. If a step fails, the
files of the work tree are restored.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from wheel_environment import PUBLIC_SURFACE, TEST_TOOLS, empty_environment, linked, public_surface, site_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADING = re.compile(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", re.MULTILINE)


class ReleaseError(Exception):
    """A release cannot be made; the message says what to change."""


@dataclass(frozen=True)
class Release:
    """One distribution and the version it is released as."""

    project: Path
    version: Version

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return self.project.name

    @property
    def tag(self) -> str:
        """The tag of the version."""
        return f"{self.name}-{self.version}"


def metadata(project: Path) -> dict[str, Any]:
    """Return the [project] table of a distribution."""
    table: dict[str, Any] = tomllib.loads(project.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(project: Path) -> list[Requirement]:
    """Return what a distribution requires, its extras included."""
    about = metadata(project)
    texts = list(about["dependencies"])
    for extra in about.get("optional-dependencies", {}).values():
        texts += extra
    return [Requirement(text) for text in texts]


def parse(words: Sequence[str], root: Path) -> list[Release]:
    """Return the releases that the command line asks for, in the order in which they require each other."""
    pairs = [word.partition("=")[::2] for word in words]
    if len(words) == 2 and "=" not in "".join(words) and not (root / "packages" / words[1]).is_dir():
        pairs = [(words[0], words[1])]
    found = {}
    for name, text in pairs:
        project = root / "packages" / name
        if not project.joinpath("pyproject.toml").is_file():
            known = ", ".join(sorted(file.parent.name for file in root.glob("packages/*/pyproject.toml")))
            raise ReleaseError(f"{name!r} is not a distribution of this workspace. There are: {known}.")
        try:
            found[name] = Release(project, Version(text or metadata(project)["version"]))
        except InvalidVersion:
            raise ReleaseError(f"{text!r} is not a version, such as 1.2.0.") from None
    # Without extras, which may name a distribution that requires this one.
    needs = {
        name: {Requirement(text).name for text in metadata(release.project)["dependencies"]} & set(found)
        for name, release in found.items()
    }
    return [found[name] for name in TopologicalSorter(needs).static_order()]


def check_versions(releases: Sequence[Release], root: Path) -> None:
    """Refuse a version that is not above the last tag, and one that a sibling of the workspace does not take."""
    for release in releases:
        tags = _git(root, "tag", "--list", f"{release.name}-*").split()
        last = max((Version(tag.removeprefix(f"{release.name}-")) for tag in tags), default=None)
        if last is not None and release.version <= last:
            raise ReleaseError(f"{release.name} {release.version}: {last} is tagged already. Give a version above it.")
        announced = Version(metadata(release.project)["version"])
        if release.version < announced:
            raise ReleaseError(
                f"{release.name} {release.version} is below {announced}, which pyproject.toml announces."
            )
    together = {release.name: release.version for release in releases}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        for item in requirements(file.parent):
            version = together.get(item.name)
            if version is not None and not item.specifier.contains(version) and file.parent.name not in together:
                raise ReleaseError(
                    f"{file.parent.name} requires {item} and does not take {item.name} {version}. Release it too: "
                    f"{file.parent.name}=VERSION, with a requirement that allows {version}."
                )


def write(releases: Sequence[Release], today: str) -> None:
    """Write versions, the date into the changelogs, and what releases of the same run require of each other."""
    for release in releases:
        source = release.project / "src" / release.name.replace("-", "_") / "__init__.py"
        _replace(release.project / "pyproject.toml", r'(?m)^version = ".*"$', f'version = "{release.version}"')
        _replace(source, r'(?m)^__version__ = ".*"$', f'__version__ = "{release.version}"')
        for other in releases:
            pin = f">={other.version.major}.{other.version.minor},<{other.version.major + 1}"
            pattern = rf'"{other.name}(\[[\w,-]+\])?>=[^"]*"'
            _replace(release.project / "pyproject.toml", pattern, rf'"{other.name}\g<1>{pin}"')
        if release.name == "accel":
            _replace(release.project.parents[1] / "README.md", r"\bVersion \S+ ", f"Version {release.version} ")
        changelog = release.project / "CHANGELOG.md"
        changelog.write_text(_dated(changelog, release, today), encoding="utf-8")


def _replace(file: Path, pattern: str, text: str) -> None:
    file.write_text(re.sub(pattern, text, file.read_text(encoding="utf-8")), encoding="utf-8")


def _dated(changelog: Path, release: Release, today: str) -> str:
    text = changelog.read_text(encoding="utf-8")
    heading = _HEADING.search(text)
    if heading is None or heading[2]:
        released = f"{heading[1]} of {heading[2]} is its first section" if heading else "it has no section"
        raise ReleaseError(f"{changelog}: {released}. Add `## {release.version}` with what changes for users.")
    following = _HEADING.search(text, heading.end())
    if not text[heading.end() : following.start() if following else None].strip():
        raise ReleaseError(f"{changelog}: the section {heading[1]} is empty. Say what changes for users.")
    return f"{text[: heading.start()]}## {release.version} ({today}){text[heading.end() :]}"


def build(release: Release, target: Path) -> list[Path]:
    """Build the sdist, the wheel from it, and check both with twine; returns their paths."""
    before = set(target.iterdir())
    _run("-m", "hatchling", "build", "-t", "sdist", "-d", target, folder=release.project)
    (sdist,) = set(target.iterdir()) - before
    # From the sdist, so that it is known to be complete.
    _run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, sdist, folder=target)
    files = sorted(set(target.iterdir()) - before)
    _run("-m", "twine", "check", "--strict", *files, folder=target)
    return files


_PIP = ("-m", "pip", "-qq", "--disable-pip-version-check")


class Index:
    """Installs from the built files, the index that pip is configured for, and another one.

    Args:
        built: the directory of the built files.
        url: another index with published siblings, or None.
        work: an empty directory for environments.
    """

    def __init__(self, built: Path, url: str | None, work: Path) -> None:
        self.options = ["--find-links", built, *(["--extra-index-url", url] if url else [])]
        self.work = work
        # 700 MB and more: shown to every environment instead of installed in each.
        work.joinpath("torch").mkdir()
        self.torch = linked(["torch"], work / "torch")

    def environment(self, name: str) -> Path:
        """Return the Python of a new environment that has torch and nothing else."""
        python = empty_environment(self.work / name)
        site_packages(python).joinpath("torch.pth").write_text(f"{self.torch}\n")
        return python

    def install(self, python: Path, *wanted: str, dry_run: bool = False) -> list[dict[str, Any]]:
        """Install, and return what was chosen; with ``dry_run`` it is only resolved."""
        report = [*(["--dry-run"] if dry_run else []), "--report", "-", *self.options]
        text = _run("-m", "pip", "--python", python, *_PIP[2:], "install", *report, *wanted, folder=self.work)
        chosen: list[dict[str, Any]] = json.loads(text)["install"]
        return chosen

    def newest(self, name: str) -> str | None:
        """Return the newest published version of a distribution; None if there is none yet."""
        try:
            # Below 1 is an unrelated distribution of the public index.
            (entry,) = self.install(Path(sys.executable), "--ignore-installed", "--no-deps", f"{name}>=1", dry_run=True)
        except ReleaseError:
            return None
        return str(entry["metadata"]["version"])


def try_out(release: Release, root: Path, index: Index, together: Mapping[str, Version], run_tests: bool) -> None:
    """Install a release beside the newest published siblings, and run the tests of its public surface."""
    wanted = f"{release.name}=={release.version}"
    python = index.environment(f"env-{release.name}")
    index.install(python, wanted)
    _run("-m", "pip", "--python", python, *_PIP[3:], "check", folder=index.work)
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        name = file.parent.name
        if name in together or release.name not in {item.name for item in requirements(file.parent)}:
            continue
        newest = index.newest(name)
        if newest is None:
            continue
        try:
            index.install(index.environment(f"env-{release.name}-{name}"), wanted, f"{name}=={newest}", dry_run=True)
        except ReleaseError as error:
            raise ReleaseError(
                f"the published {name} {newest} does not take {release.name} {release.version}. Release it too: "
                f"{name}=VERSION. pip says:\n{error}"
            ) from None
    if run_tests and release.name in PUBLIC_SURFACE:
        folder, tools = index.work / f"tests-{release.name}", index.work / f"tools-{release.name}"
        folder.mkdir()
        tools.mkdir()
        command, variables = public_surface(python, release.project, folder, linked(TEST_TOOLS, tools))
        _run(*command[1:], folder=folder, python=python, **variables)


def release_all(releases: Sequence[Release], root: Path, options: argparse.Namespace) -> None:
    """Build and try out all releases; then upload, commit and tag each in order."""
    together = {release.name: release.version for release in releases}
    files: dict[str, list[Path]] = {}
    with tempfile.TemporaryDirectory(prefix="release-") as directory:
        built, work = Path(directory, "dist"), Path(directory, "work")
        built.mkdir()
        work.mkdir()
        try:
            write(releases, datetime.datetime.now(datetime.timezone.utc).date().isoformat())
            for release in releases:
                _say(f"{release.name} {release.version}: building wheel and sdist")
                files[release.name] = build(release, built)
            index = Index(built, options.index, work)
            for release in releases:
                _say(f"{release.name} {release.version}: installing it beside the newest published siblings")
                try_out(release, root, index, together, not options.skip_tests)
            for release in releases if options.tag or options.upload else ():
                _publish(release, root, files[release.name], options.upload)
        finally:
            # What was committed stays; a release that failed or was only tried leaves no change.
            _git(root, "checkout", "--quiet", "--", "packages")
    if not (options.tag or options.upload):
        _say("nothing was kept: --tag commits and tags, --upload URL also uploads")


def _publish(release: Release, root: Path, files: Sequence[Path], url: str | None) -> None:
    if url is not None:
        _say(f"{release.name} {release.version}: uploading to {url}")
        _run("-m", "twine", "upload", "--non-interactive", "--repository-url", url, *files, folder=root)
    _git(root, "add", "--", str(release.project.relative_to(root)))
    if _git(root, "diff", "--cached", "--name-only"):
        _git(root, "commit", "--quiet", "-m", f"{release.name} {release.version}")
    _git(root, "tag", "-a", release.tag, "-m", f"{release.name} {release.version}")
    _say(f"{release.name} {release.version}: tagged {release.tag}")


def _run(*words: object, folder: Path, python: object = sys.executable, **variables: str) -> str:
    """Return the standard output of a Python command; ReleaseError with all that it printed if it fails."""
    command = [str(python), *map(str, words)]
    # This script's variables for other interpreters would show them the work tree.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a release is refused."""
    parser = argparse.ArgumentParser(prog="scripts/release", description="Release distributions of this workspace.")
    parser.add_argument("releases", nargs="+", metavar="PACKAGE[=VERSION]", help="or PACKAGE VERSION for a single one")
    parser.add_argument("--tag", action="store_true", help="commit and tag each release")
    parser.add_argument("--upload", metavar="URL", help="upload each with twine, and tag it")
    parser.add_argument("--index", metavar="URL", help="simple index with the published siblings, besides that of pip")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the tests of the public surface")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the workspace")
    options = parser.parse_args(argv)
    root = options.root.resolve()
    try:
        if _git(root, "status", "--porcelain", "--untracked-files=no"):
            raise ReleaseError("the work tree has changes that are not committed. Commit or stash them.")
        releases = parse(options.releases, root)
        check_versions(releases, root)
        release_all(releases, root, options)
    except ReleaseError as error:
        print(f"scripts/release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
