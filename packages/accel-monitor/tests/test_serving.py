"""A run over HTTP: metrics, the page, and who gets neither."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from written_runs import write

from accel_monitor.client import remote_page, split_remote
from accel_monitor.commands.monitor import COMMAND
from accel_monitor.metrics import metrics
from accel_monitor.page import render
from accel_monitor.records import read_runs
from accel_monitor.serving import TOKEN_FILE, Server, ServerProcess
from accel_state import ConfigurationError
from accel_state.ports import get_free_port, parse_listening_address


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write(tmp_path, 0, 2, {"forward": 3.0, "data": 1.0, "step": 10, "part": "forward", "loss": None}, host='a"b\\c')
    write(tmp_path, 1, 2, {"forward": 2.0, "data": 2.0, "step": 12, "loss": 0.5, "part": "saving"})
    served = Server(tmp_path / "monitor", "127.0.0.1", 0)
    thread = threading.Thread(target=served.serve_forever, args=(0.02,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


def get(port: int, path: str, token: str | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def values_of(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_have_the_counters_of_all_ranks(server: Server) -> None:
    status, text = get(server.server_port, "/metrics", server.token)
    values = values_of(text)
    first, second = 'replica="0",rank="0",host="a\\"b\\\\c"', 'replica="0",rank="1",host="far"'
    assert status == 200 and text.endswith("\n")
    assert values[f"accel_monitor_step{{{first}}}"] == 10 and values[f"accel_monitor_step{{{second}}}"] == 12
    assert values[f'accel_monitor_part_seconds_total{{{second},part="data"}}'] == 2.0
    assert values[f"accel_monitor_samples_total{{{first}}}"] == 40 and values[f"accel_monitor_loss{{{second}}}"] == 0.5
    assert not any(name.startswith(f"accel_monitor_loss{{{first}") for name in values), "unknown, and left out"
    # All causes add up to the life of both ranks, and goodput is the share of the first.
    causes = {name: value for name, value in values.items() if name.startswith("accel_monitor_ledger_seconds")}
    share = causes['accel_monitor_ledger_seconds{cause="productive steps"}'] / sum(causes.values())
    assert share == pytest.approx(values["accel_monitor_goodput_ratio"])
    # Lines of one metric follow each other, after one line of its type.
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    order = [line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")]
    assert list(dict.fromkeys(order)) == kinds


def test_values_without_a_number(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, {"forward": 3.0, "step": 10, "part": "forward", "loss": "inf"})
    (run,) = read_runs(tmp_path)
    assert 'accel_monitor_loss{replica="0",rank="0",host="far"} +Inf\n' in metrics(run)


@pytest.mark.parametrize("token", [None, "", "wrong", "x" * 64])
def test_nothing_is_told_without_the_token(server: Server, token: str | None) -> None:
    for path in ("/metrics", "/page", "/nothing"):
        status, text = get(server.server_port, path, token)
        assert status == 401 and "accel_monitor" not in text and "rank" not in text


def test_the_token_is_the_owners_and_stays(tmp_path: Path, server: Server) -> None:
    file = tmp_path / "monitor" / TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(server.token) == 64
    again = Server(tmp_path / "monitor", "127.0.0.1", 0)
    again.server_close()
    assert again.token == server.token
    assert sorted(entry.name for entry in file.parent.iterdir() if "token" in entry.name) == [TOKEN_FILE]
    file.write_text("short\n")
    with pytest.raises(ConfigurationError, match="has 5 characters"):
        Server(tmp_path / "monitor", "127.0.0.1", 0)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        Server(tmp_path / "monitor", "127.0.0.1", 0)


def test_requests_that_cannot_be_answered(server: Server, tmp_path: Path) -> None:
    assert get(server.server_port, "/etc/passwd", server.token)[0] == 404
    assert get(server.server_port, "/page?columns=wide", server.token) == (
        400,
        "run, columns, lines must be integers\n",
    )
    status, text = get(server.server_port, "/page?run=7", server.token)
    assert status == 503 and "holds 1 run(s)" in text
    with socket.create_connection(("127.0.0.1", server.server_port)) as nonsense:
        nonsense.sendall(b"\xff\xfe\r\n\r\n")
        assert b"400" in nonsense.recv(1000)
    assert get(server.server_port, "/metrics", server.token)[0] == 200


def test_idle_connections_do_not_keep_others_out_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.2)
    idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(40)]
    deadline = time.monotonic() + 60
    while True:
        try:
            assert get(server.server_port, "/metrics", server.token)[0] == 200
            break
        except (OSError, http.client.HTTPException):  # all places were taken by the idle ones
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for connection in idle:
        connection.close()


def test_the_page_of_another_machine_is_that_of_the_files(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, token_file = f"127.0.0.1:{server.server_port}", tmp_path / "monitor" / TOKEN_FILE
    (run,) = read_runs(tmp_path)
    page = remote_page("127.0.0.1", server.server_port, token_file, 120, 30, None)
    assert page == list(render(run, 120, 30)) and any("saving" in line for line in page)
    assert COMMAND.run([address, "--token_file", str(token_file)]) == 0
    assert "steps 10 to 12" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="--token_file"):
        COMMAND.run([address])
    other = tmp_path / "other"
    other.write_text("0" * 64)
    with pytest.raises(ConfigurationError, match="another token"):
        COMMAND.run([address, "--token_file", str(other)])
    with pytest.raises(ConfigurationError, match="answers 503"):
        COMMAND.run([address, "--token_file", str(token_file), "--run", "3"])
    with pytest.raises(ConfigurationError, match="no run answers"):
        COMMAND.run([f"127.0.0.1:{get_free_port()}", "--token_file", str(token_file)])


def test_what_another_machine_sends_does_not_control_the_terminal(server: Server, tmp_path: Path) -> None:
    write(tmp_path, 0, 2, {"forward": 3.0, "step": 10, "part": "forward"}, host="host\x1b]0;title\x07")
    page = remote_page("127.0.0.1", server.server_port, tmp_path / "monitor" / TOKEN_FILE, 200, 30, None)
    assert any("host]0;title" in line for line in page) and not any("\x1b" in line or "\x07" in line for line in page)


def test_addresses() -> None:
    assert parse_listening_address("9400") == ("127.0.0.1", 9400)
    assert parse_listening_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_listening_address("[::1]:9400") == ("::1", 9400)
    for text in ("", ":9400", "0", "65536", "host:9400", "::1:9400", "[1.2.3.4]:9400", "9400x", "1.2.3:80"):
        with pytest.raises(ValueError, match="is not a port"):
            parse_listening_address(text)
    assert split_remote("node1:9400") == ("node1", 9400) and split_remote("[::1]:9400") == ("::1", 9400)
    for text in ("runs/mlp", "node1", "node1:x", "http://node1:9400", "user@node1:9400", "node1:9400/x"):
        assert split_remote(text) is None


PARENT = """
import os, sys, time
from pathlib import Path
from accel_monitor.serving import ServerProcess
server = ServerProcess(Path(sys.argv[1]), sys.argv[2])
print(server._process.pid, flush=True)
time.sleep(600)
"""


def wait_for(port: int, token_file: Path, answers: bool) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            reached = get(port, "/metrics", token_file.read_text().strip())[0] == 200
        except (OSError, http.client.HTTPException):
            reached = False
        if reached == answers:
            return
        assert time.monotonic() < deadline, answers
        time.sleep(0.1)


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, {"forward": 3.0, "step": 10, "part": "forward"})
    port, token_file = get_free_port(), tmp_path / "monitor" / TOKEN_FILE
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(port)], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for(port, token_file, True)
        os.kill(parent.pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.communicate()
    wait_for(port, token_file, False)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    # The next process of rank 0 serves at the same port, and with the same token.
    token = token_file.read_text()
    following = ServerProcess(tmp_path, str(port))
    try:
        wait_for(port, token_file, True)
    finally:
        following.stop()
    wait_for(port, token_file, False)
    assert token_file.read_text() == token


def test_a_port_that_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="monitor_port='node1:1'"):
        ServerProcess(tmp_path, "node1:1")
