"""Train in workers of Ray Train; states that are reported through Ray continue after a failure, on any node.

    python examples/ray_trainer.py --storage /shared/runs

Needs `pip install "ray[train]"`. It joins the cluster of RAY_ADDRESS, or of this machine; --storage is a directory that
all nodes share.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import set_seed


def train(settings: dict[str, Any]) -> None:
    set_seed(1)
    features = torch.randn(512, 8)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reported = ray.train.get_checkpoint()
    with contextlib.nullcontext(None) if reported is None else reported.as_directory() as directory:
        accelerator = Accelerator(project_dir=directory)
        loader = DataLoader(data, batch_size=32, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if directory is not None and accelerator.resume():
            accelerator.print(f"continues with epoch {loader.iteration}", flush=True)
    for epoch in range(loader.iteration, settings["epochs"]):
        total = torch.zeros((), device=accelerator.device)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        loss = accelerator.reduce(total, "mean").item() / len(loader)
        # One directory, which all ranks write together, and one of them reports.
        state = Path(settings["storage"], f"epoch_{epoch}")
        accelerator.save_state(state / "state")
        checkpoint = Checkpoint.from_directory(str(state)) if accelerator.is_main_process else None
        ray.train.report({"epoch": epoch, "loss": loss}, checkpoint=checkpoint)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(state)  # Ray has copied it
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    weights = b"".join(value.numpy(force=True).tobytes() for value in model.state_dict().values())
    accelerator.print(f"sha256 of the weights: {hashlib.sha256(weights).hexdigest()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory that all nodes share")
    parser.add_argument("--name", default="ray_trainer", help="name of the run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    storage = str(Path(arguments.storage).absolute())
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "storage": str(Path(storage, arguments.name))},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(name=arguments.name, storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    )
    print(f"loss of the last epoch: {trainer.fit().metrics['loss']:.6f}")


if __name__ == "__main__":
    main()
