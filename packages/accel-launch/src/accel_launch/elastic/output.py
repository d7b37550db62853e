"""Where the output of ranks goes: files of ``--log_dir``, and copies on the screen (``--tee``). Torch-free."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import IO, TextIO

_POLL_SECONDS = 0.1
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True)
class Streams:
    """Streams of a rank: 0 to 3, the sum of 1 for stdout and 2 for stderr."""

    kept: int
    """Those that go to a file."""
    copied: int
    """Those of ``kept`` that are also shown."""
    shown: bool = True
    """Whether anything is shown."""


def rank_streams(local_rank: int, tee: str, redirects: str, local_ranks_filter: str | None) -> Streams:
    """Return the streams of a local rank, from the options of these names."""
    teed, redirected = _streams_of(tee, local_rank), _streams_of(redirects, local_rank)
    shown = local_ranks_filter is None or local_rank in map(int, local_ranks_filter.split(","))
    return Streams(teed | redirected, teed, shown)


def _streams_of(text: str, local_rank: int) -> int:
    """Return what ``--tee`` or ``--redirects`` says of a local rank; see :class:`Streams`."""
    if ":" not in text:
        return int(text)
    given = {int(rank): int(streams) for rank, _, streams in (entry.partition(":") for entry in text.split(","))}
    return given.get(local_rank, 0)


class Tee:
    """The output of one rank that is kept in files, whose lines may be copied to the screen, or that is not shown.

    Args:
        directory: of the rank.
        streams: which streams go where.
        prefix: of each line on the screen.
        screen: the launcher's stdout and stderr.
    """

    def __init__(self, directory: Path, streams: Streams, prefix: str, screen: tuple[TextIO, TextIO]) -> None:
        self._finished = threading.Event()
        self._threads: list[threading.Thread] = []
        self._copied: list[TextIO] = []  # opened here, so that a limit of open files fails the start and no thread
        self.files: dict[str, IO[bytes]] = {}
        """The arguments for :class:`subprocess.Popen`."""
        for stream, name, target in ((_STDOUT, "stdout", screen[0]), (_STDERR, "stderr", screen[1])):
            if not streams.kept & stream:
                if not streams.shown:
                    self.files[name] = Path(os.devnull).open("wb")  # noqa: SIM115 - closed with the others
                continue
            path = directory / f"{name}.log"
            self.files[name] = path.open("wb")
            if streams.copied & stream and streams.shown:
                self._copied.append(path.open(errors="replace"))
                arguments = (self._copied[-1], prefix, target)
                self._threads.append(threading.Thread(target=self._copy, args=arguments, daemon=True))

    def start(self) -> None:
        """Begin to copy, once the rank has the files."""
        for file in self.files.values():
            file.close()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Copy the rest, once the rank has ended."""
        self._finished.set()
        for file in self.files.values():
            file.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for copied in self._copied:
            copied.close()

    def _copy(self, file: TextIO, prefix: str, target: TextIO) -> None:
        while True:
            is_last = self._finished.is_set()  # before the look, so that nothing is written after the last one
            while line := file.readline():
                target.write(f"{prefix}{line}")
                target.flush()
            if is_last:
                return
            self._finished.wait(_POLL_SECONDS)


def line_prefix(template: str | None, variables: Mapping[str, str]) -> str:
    """Return the prefix of a rank's lines, from its variables; by default role and local rank."""
    names = {"role_name": "ROLE_NAME", "local_rank": "LOCAL_RANK", "rank": "RANK"}
    values = {name: variables[variable] for name, variable in names.items()}
    return Template(template or "[${role_name}${local_rank}]:").safe_substitute(values)
