"""A replica of a fault-tolerant run in the process of a test, and a foreign process that attacks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel_launch.lighthouse import Lighthouse
from accel_state.options import FaultToleranceOptions

TOKEN = "0123456789abcdef" * 2

# Joins a lighthouse with a higher step than all others, with a group, a store and a state of its own as torchft makes
# them. The state runs a command when it is unpickled. It ends when the file "stop" exists.
ATTACKER = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torchft
from torch.distributed import PrefixStore, TCPStore
from torchft.checkpointing import HTTPTransport
lighthouse, folder = sys.argv[1], Path(sys.argv[2])

class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {folder}/ran",)

wait, pg = timedelta(seconds=5), torchft.ProcessGroupGloo(timeout=timedelta(seconds=5))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
inner = pg.configure

def configure(address, replica, rank, size, *more):
    (folder / f"met.{size}").touch()
    name = address.partition("/")[2]
    tickets = PrefixStore("accel/ticket", store)
    tickets.set(name, "ticket")
    tickets.set(f"{name}/ticket/{rank}", "00" * 32)  # where members prove that they have the token
    inner(f"{address}/ticket", replica, rank, size, *more)

pg.configure = configure
transport = HTTPTransport(timeout=wait, num_chunks=0)
transport.send_checkpoint([0], 10**6, Malicious(), wait)
transport.send_checkpoint = lambda **given: None
transport.disallow_checkpoint = lambda: None
manager = torchft.Manager(
    pg=pg, load_state_dict=lambda state: None, state_dict=lambda: Malicious(), min_replica_size=1,
    use_async_quorum=False, timeout=wait, quorum_timeout=wait, connect_timeout=wait, rank=0, world_size=1,
    store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id="accel_9",
    hostname="127.0.0.1", quorum_retries=1000, checkpoint_transport=transport,
)
while not (folder / "stop").exists():
    try:
        manager.load_state_dict({"step": 10**6, "batches_committed": 0})
        manager.start_quorum()
        manager.should_commit()
    except Exception as error:
        print(error, flush=True)
os._exit(0)
"""


@contextlib.contextmanager
def environment_of_replicas(join_seconds: float) -> Iterator[dict[str, str]]:
    """The environment of two replicas with a lighthouse, which waits so long for the second one."""
    options = FaultToleranceOptions(min_replicas=1, replica_timeout=join_seconds, heartbeat_timeout=0.3)
    # A process: a thread of it that logs reads the environment, which pytest changes meanwhile.
    server = Lighthouse(options, TOKEN, log=False, say=print)
    try:
        yield {
            "TORCHFT_LIGHTHOUSE": server.address,
            "ACCELERATE_RUN_TOKEN": TOKEN,
            "ACCELERATE_FT_NUM_REPLICAS": "2",
            "RUST_LOG": "error",
        }
    finally:
        server.close()


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a replica whose peer never comes."""
    pytest.importorskip("torchft", reason="needs torchft: pip install 'accel[ft]'")
    with environment_of_replicas(join_seconds=1.0) as environment:
        for name, value in {**environment, "ACCELERATE_FT_REPLICA_TIMEOUT": "5"}.items():
            monkeypatch.setenv(name, value)
        yield


def prepared(**settings: Any) -> tuple[Any, ...]:
    """An Accelerator of strategy ft, and a model, an optimizer and a loader."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy="ft", **settings)
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader))
