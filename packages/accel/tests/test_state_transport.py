"""States that travel between replicas: what arrives, and what foreign processes can do."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ft_runs import ATTACKER, TOKEN, prepared

from accel.fault_tolerance import transport as module
from accel.fault_tolerance.transport import StateError, StateTransport, pack, unpack
from accel_state import run_token

SECONDS = timedelta(seconds=20)


class Malicious:
    """What runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def replica() -> Iterator[StateTransport]:
    made = StateTransport("127.0.0.1", TOKEN.encode(), SECONDS)
    yield made
    made.shutdown()


def received(replica: StateTransport, step: int, token: str = TOKEN) -> Any:
    other = StateTransport("127.0.0.1", token.encode(), SECONDS)
    try:
        return other.recv_checkpoint(0, replica.metadata(), step, SECONDS)
    finally:
        other.shutdown()


def test_a_state_arrives_as_it_was(replica: StateTransport) -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
    state = {
        "tensors": {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds},
        "views": [torch.arange(10.0)[::3], torch.randn(3, 4).t(), torch.tensor(7), torch.zeros(0, 5)],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        0: {"exp_avg": torch.randn(3), "lr": 0.1, "betas": (0.9, 0.999), "foreach": None},
        "ordered": OrderedDict(a=torch.ones(1)),
        "others": [b"bytes", "text", float("inf"), {1, 2}, np.float64(0.5), np.arange(3), torch.float8_e4m3fn],
    }
    replica.send_checkpoint([1], 7, state, SECONDS)
    found = received(replica, 7)
    replica.disallow_checkpoint()
    assert repr(found) == repr(torch.utils._pytree.tree_map_only(torch.nn.Parameter, torch.Tensor.detach, state))
    for name, value in state["tensors"].items():
        assert found["tensors"][name].dtype is value.dtype and torch.equal(found["tensors"][name], value)
    assert all(map(torch.equal, found["views"], state["views"]))
    assert type(found["ordered"]) is OrderedDict


def test_a_replica_that_asks_early_waits_and_one_that_asks_for_another_step_gets_nothing(
    replica: StateTransport,
) -> None:
    threading.Timer(0.5, replica.send_checkpoint, ([1], 3, {"a": torch.ones(2)}, SECONDS)).start()
    assert torch.equal(received(replica, 3)["a"], torch.ones(2))
    with pytest.raises(StateError, match="4"):
        received(replica, 4)


def test_the_state_stays_as_it_is_until_it_was_sent(replica: StateTransport) -> None:
    state = torch.zeros(1 << 24)  # more than the sockets' buffers hold
    replica.send_checkpoint([1], 1, state, SECONDS)
    address = replica.metadata().rpartition(":")
    with run_token.connect((address[0], int(address[2])), TOKEN.encode(), 20) as slow:
        slow.sendall((1).to_bytes(8, "big"))
        run_token.receive(slow, 8)
        ended: list[float] = []
        thread = threading.Thread(target=lambda: (replica.disallow_checkpoint(), ended.append(time.monotonic())))
        thread.start()
        time.sleep(0.3)
        assert not ended
        while slow.recv(1 << 20):
            pass
    thread.join(20)
    assert ended


def test_without_the_token_no_state_is_given_or_taken(
    replica: StateTransport, caplog: pytest.LogCaptureFixture
) -> None:
    replica.send_checkpoint([1], 7, {"a": torch.ones(2)}, SECONDS)
    with pytest.raises(run_token.TokenError):
        received(replica, 7, token="another token of another run")
    host, _, port = replica.metadata().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        plain.sendall(b"GET /checkpoint/7/full HTTP/1.1\r\n\r\n".ljust(64))
        assert len(b"".join(iter(lambda: plain.recv(100), b""))) == 32  # the challenge
    assert "does not have the token" in caplog.text and TOKEN not in caplog.text


def test_a_state_runs_no_code(replica: StateTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of a process that has the token."""
    marker, values = tmp_path / "marker", {"a": Malicious(tmp_path / "marker")}
    with pytest.raises(StateError, match=r"posix\.system"):
        pack(values)
    with pytest.raises(StateError):
        unpack(pickle.dumps(values))
    monkeypatch.setattr(module, "pack", lambda value: _saved(value))
    replica.send_checkpoint([1], 7, values, SECONDS)
    with pytest.raises(StateError, match=r"posix\.system"):
        received(replica, 7)
    assert not marker.exists()


def _saved(value: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def stop_when_met(folder: Path) -> None:
    """End the foreign process soon after the replica was in a quorum with it."""
    deadline = time.monotonic() + 60
    while not (folder / "met.2").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # for what it sends
    (folder / "stop").touch()


def test_a_foreign_process_at_the_lighthouse_is_refused(lighthouse: None, tmp_path: Path) -> None:
    """It is in the quorum, with a higher step; the replica neither runs its code, nor trains with it."""
    accelerator, model, optimizer, loader = prepared()
    (tmp_path / "attack.py").write_text(ATTACKER)
    address = os.environ["TORCHFT_LIGHTHOUSE"]
    attack = subprocess.Popen([sys.executable, str(tmp_path / "attack.py"), address, str(tmp_path)])
    started: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "met.1").exists():
            assert time.monotonic() < deadline and attack.poll() is None
            time.sleep(0.05)
        threading.Thread(target=stop_when_met, args=(tmp_path,)).start()
        for (x,) in loader:  # the first batch is handed out when the foreign process has gone
            started.append((tmp_path / "stop").exists())
            accelerator.backward(model(x).sum())
            optimizer.step()
    finally:
        (tmp_path / "stop").touch()
        attack.kill()
        attack.wait()
    assert (tmp_path / "met.2").exists(), "the two have not met"
    assert all(started) and optimizer.steps_taken == 2
    assert not (tmp_path / "ran").exists()
    accelerator.end_training()
