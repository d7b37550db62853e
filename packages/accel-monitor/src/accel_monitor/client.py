"""Asks a run that serves with ``--monitor_port`` for its page. Torch-free."""

from __future__ import annotations

import http.client
import urllib.parse
from pathlib import Path

from accel_state.errors import ConfigurationError

from .serving import read_token

_SECONDS = 10.0
_MOST_BYTES = 1 << 22


def split_remote(text: str) -> tuple[str, int] | None:
    """Return the host and port in ``HOST:PORT``; None if the text is something else, such as a directory."""
    try:
        parts = urllib.parse.urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return None if not host or not port or parts.netloc != text or parts.username is not None else (host, port)


def remote_page(host: str, port: int, token_file: Path, columns: int, lines: int, number: int | None) -> list[str]:
    """Return the lines of the page of a run on another machine.

    Args:
        host: where the run's rank 0 serves.
        port: likewise.
        token_file: holds the token of the run.
        columns: width of the page.
        lines: its height.
        number: of the run in its directory; None for the latest.

    Raises:
        ConfigurationError: nothing answers there, or not with a page.
    """
    query = {"columns": columns, "lines": lines, **({} if number is None else {"run": number})}
    headers = {"Authorization": f"Bearer {read_token(token_file)}"}
    # No proxy and no redirection: either would get the token.
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", f"/page?{urllib.parse.urlencode(query)}", headers=headers)
        answer = connection.getresponse()
        text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"no run answers at {host}:{port} ({getattr(error, 'strerror', None) or error!r}). It is served while its "
            "rank 0 runs with `accel launch --monitor_port`; afterwards, give the project directory."
        ) from error
    finally:
        connection.close()
    # What another machine sends does not control this terminal.
    found = ["".join(char for char in line if char.isprintable()) for line in text.splitlines()]
    if answer.status == 401:
        raise ConfigurationError(f"{host}:{port} has another token than {token_file}. Copy the file of that run again.")
    if answer.status != 200:
        raise ConfigurationError(f"{host}:{port} answers {answer.status}: {' '.join(found)[:300]}")
    return found
