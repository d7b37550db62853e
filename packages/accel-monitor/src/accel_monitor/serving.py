"""Serves a run over HTTP: metrics for Prometheus at ``/metrics``, and the page of ``accel monitor`` at ``/page``.

Rank 0 starts it as a process of its own (:class:`ServerProcess`), so that clients cost the training loop nothing. It
reads the files of the run, runs no code of them, and answers only requests with the token of the run, which is in
``monitor/token`` and readable by its owner only: metrics tell names of hosts, and losses. Torch-free.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError
from accel_state.paths import make_directory, refuse_link
from accel_state.ports import parse_listening_address

from .metrics import CONTENT_TYPE, metrics
from .page import render
from .records import FOLDER, Run, chosen_run

TOKEN_FILE = "token"
"""In the directory of the run's files."""
_SHORTEST_TOKEN = 16
_CONNECTIONS = 32
_CLIENT_SECONDS = 10.0
_FRESH_SECONDS = 1.0
_LISTEN_SECONDS = 20.0
_MOST_COLUMNS, _MOST_LINES = 1000, 10_000


def token_of(folder: Path) -> str:
    """Return the token of a run, which is made where there is none.

    Args:
        folder: the directory of the run's files.

    Raises:
        ConfigurationError: the file is a link, or too short to be a secret.
        OSError: it cannot be read or written.
    """
    make_directory(folder)
    file = folder / TOKEN_FILE
    with suppress(FileExistsError):
        # The name appears with its content: another rank 0 may read it at once.
        temporary = folder / f".{TOKEN_FILE}-{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(secrets.token_hex(32) + "\n")
            os.link(temporary, file)
        finally:
            temporary.unlink()
    return read_token(file)


def read_token(file: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigurationError: the file cannot be read, is a link, or too short to be a secret.
    """
    refuse_link(file)
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} holds no token ({getattr(error, 'strerror', None) or 'not a text'}). The run that serves writes "
            f"it to {FOLDER}/{TOKEN_FILE} of its project directory; copy that file."
        ) from error
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigurationError(
            f"the token in {file} has {len(token)} characters and needs {_SHORTEST_TOKEN}. Remove the file: the next "
            "run makes a new one."
        )
    return token


class Server(ThreadingHTTPServer):
    """Serves the run in a directory.

    Args:
        folder: the directory of its files.
        host: the address to listen at.
        port: 0 for any free one.

    Raises:
        ConfigurationError: the token cannot be used.
        OSError: the port is in use, or a file cannot be read.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.folder: Path = folder
        self.token: str = token_of(folder)
        if ":" in host:
            self.address_family: int = socket.AF_INET6
        self._lock = threading.Lock()
        self._read: tuple[float, int | None, Run] | None = None
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def run_now(self, number: int | None) -> Run:
        """Return the run, read at most once a second however many clients ask.

        Raises:
            ConfigurationError: there is no such run yet.
        """
        with self._lock:
            if self._read is None or self._read[1] != number or time.monotonic() - self._read[0] > _FRESH_SECONDS:
                run = chosen_run(self.folder, number)
                self._read = time.monotonic(), number, run
            return self._read[2]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there are not too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or send invalid data; log other errors."""
        if not isinstance(sys.exc_info()[1], (OSError, ValueError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _CLIENT_SECONDS
    server_version, sys_version = "accel-monitor", ""

    def do_GET(self) -> None:
        """Answer ``/metrics`` or ``/page``."""
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self._answer(401, "the token of the run is missing or another one\n")
            return
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        try:
            if parts.path == "/metrics":
                self._answer(200, metrics(self.server.run_now(None)), CONTENT_TYPE)
            elif parts.path == "/page":
                number, columns, lines = (int(query[name]) if name in query else None for name in _QUERY)
                page = render(
                    self.server.run_now(number), min(columns or 100, _MOST_COLUMNS), min(lines or 40, _MOST_LINES)
                )
                self._answer(200, "".join(f"{line}\n" for line in page))
            else:
                self._answer(404, "there are /metrics and /page\n")
        except ConfigurationError as error:
            self._answer(503, f"{error}\n")
        except ValueError:
            self._answer(400, f"{', '.join(_QUERY)} must be integers\n")

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scraper sends four requests per minute."""


_QUERY = ("run", "columns", "lines")


class ServerProcess:
    """A process that serves the run while this process exists.

    Args:
        project_dir: the directory of the run.
        address: as ``--monitor_port`` has it.

    Raises:
        ConfigurationError: the address cannot be read.
    """

    def __init__(self, project_dir: Path, address: str) -> None:
        try:
            parse_listening_address(address)
        except ValueError as error:
            raise ConfigurationError(f"monitor_port={address!r}: {error}") from None
        self._pid = os.getpid()
        command = [sys.executable, "-m", __name__, os.fspath(project_dir / FOLDER), address, str(self._pid)]
        # In a session of its own, so that Ctrl-C in a terminal ends it with this process, and not in the middle of an
        # answer with a traceback.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(self) -> None:
        """End it. A process that was forked from this one does nothing."""
        if os.getpid() != self._pid:
            return
        self._process.terminate()
        self._process.wait()


def serve(folder: Path, address: str, parent: int) -> int:
    """Serve until the process ``parent``, which started this one, has ended.

    Returns:
        The exit code.
    """
    host, port = parse_listening_address(address)
    deadline = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            server = Server(folder, host, port)
            break
        except (OSError, ConfigurationError) as error:
            # The server of a process that was killed ends a moment after it.
            if isinstance(error, ConfigurationError) or time.monotonic() > deadline or os.getppid() != parent:
                reason = getattr(error, "strerror", None) or error
                print(
                    f"the monitor does not serve the run at {address}: {reason}. Training continues.", file=sys.stderr
                )
                return 1
            time.sleep(0.5)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    print(
        f"the monitor serves this run at http://{shown}:{server.server_port}/metrics; the token is in "
        f"{folder / TOKEN_FILE}",
        file=sys.stderr,
        flush=True,
    )
    while os.getppid() == parent:
        time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
