"""One way to start two ranks, each of which writes the same row: ``python ways.py WAY FOLDER``.

The row is what code that was started by somebody else's launcher sees of accel-state and accel-data: rank, world size,
local rank, device, the samples of a prepared loader, and a sum over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

SAMPLES, RANKS = 22, 2


def row(folder: str, communicates: bool = True) -> dict[str, Any]:
    """Write and return the row of this process."""
    from accel_data import prepare_data_loader
    from accel_state import PartialState, reduce

    state = PartialState(cpu=True)
    loader = prepare_data_loader(DataLoader(range(SAMPLES), batch_size=2), put_on_device=True)
    found = {
        "rank": state.process_index,
        "world_size": state.num_processes,
        "local_rank": state.local_process_index,
        "local_world_size": state.environment.local_world_size,
        "device": str(state.device),
        "samples": [int(sample) for batch in loader for sample in batch],
        "sum": int(reduce(torch.tensor(state.process_index + 1), "sum")) if communicates else 3,
    }
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))
    return found


def script(folder: str) -> None:
    """Any launcher that sets torchrun's variables, and mpirun."""
    row(folder)


def fabric(folder: str) -> None:
    """Lightning Fabric; its own launcher without variables."""
    from lightning.fabric import Fabric

    started = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    started.launch()
    found = row(folder)
    # Lightning would divide the samples of a prepared loader once more.
    from accel_data import prepare_data_loader
    from accel_state.errors import ConfigurationError

    loader, said = prepare_data_loader(DataLoader(range(SAMPLES), batch_size=2)), "nothing"
    try:
        started.setup_dataloaders(loader)
    except ConfigurationError as error:
        said = str(error)
    assert "use_distributed_sampler=False" in said, said
    kept = started.setup_dataloaders(loader, use_distributed_sampler=False)
    assert [int(sample) for batch in kept for sample in batch] == found["samples"]


def trainer(folder: str) -> None:
    """Lightning's Trainer, in a hook of a module."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def on_fit_start(self) -> None:
            row(folder)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits = {"max_steps": 1, "enable_model_summary": False}
    started = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy="ddp", **quiet, **limits)
    started.fit(Module(), DataLoader(torch.ones(4, 1)))


def _spawned(rank: int, method: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    row(folder)
    dist.destroy_process_group()


def _spawn(method: str, folder: str) -> None:
    torch.multiprocessing.spawn(_spawned, (method, folder), nprocs=RANKS)


def _address() -> str:
    from accel_state import get_free_port

    return f"tcp://127.0.0.1:{get_free_port()}"


def spawn_env(folder: str) -> None:
    """torch.multiprocessing.spawn, env://."""
    address = _address()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address.rpartition(":")[2])
    _spawn("env://", folder)


def spawn_tcp(folder: str) -> None:
    """torch.multiprocessing.spawn, tcp://."""
    _spawn(_address(), folder)


def spawn_file(folder: str) -> None:
    """torch.multiprocessing.spawn, file://."""
    _spawn(f"file://{folder}/store", folder)


def ray_actors(folder: str) -> None:
    """Ray actors with a process group of their own."""
    import ray

    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=1)(_Actor)
    address = _address()
    ray.get([actor.remote().run.remote(rank, address, folder) for rank in range(RANKS)])
    ray.shutdown()


class _Actor:
    def run(self, rank: int, address: str, folder: str) -> None:
        _spawned(rank, address, folder)


def ray_train(folder: str) -> None:
    """Ray Train's TorchTrainer."""
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    # One more than the workers: the trainer itself.
    ray.init(num_cpus=RANKS + 1, include_dashboard=False, log_to_driver=False)
    # By value, since the workers do not import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    TorchTrainer(lambda: row(folder) and None, scaling_config=ScalingConfig(num_workers=RANKS)).fit()
    ray.shutdown()


def mpi4py(folder: str) -> None:
    """Under mpirun: ranks of mpi4py, and a group made from them."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = world.bcast(_address() if world.rank == 0 else None)
    _spawned(world.rank, address, folder)


def _worker(folder: str) -> dict[str, Any]:
    return row(folder, communicates=False)


def workers(folder: str) -> None:
    """Workers of joblib and of concurrent.futures inside a rank: each has the row of its rank."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import joblib

    own = row(folder)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(_worker, folder).result() == own
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(_worker)(folder) for _ in range(2)) == [own, own]
    assert row(folder) == own, "the rank's own group still works"


if __name__ == "__main__":
    WAYS = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
    # DeepSpeed's launcher adds --local_rank before the arguments.
    way, place = (word for word in sys.argv[1:] if not word.startswith("--"))
    WAYS[way](place)
