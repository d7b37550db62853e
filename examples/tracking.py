"""Train on scikit-learn's handwritten digits, and log the run to experiment trackers.

    python examples/tracking.py
    accel launch --cpu --num_processes 2 examples/tracking.py --log_with all
    accel track show runs/tracking

`--log_with all` uses every tracker whose library is installed. Runs are stored locally in `--output_dir`; with
`--online`, the trackers use their servers, as configured for each of them.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import LoggerType, set_seed

PROJECT = "digits"


def offline(folder: Path) -> dict[str, dict[str, object]]:
    """Settings that store runs locally; some are environment variables, which the libraries read when imported."""
    folder = folder.resolve()
    variables = {
        "AIM_UI_TELEMETRY_ENABLED": "0",
        "CLEARML_CACHE_DIR": folder / "clearml",
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_OFFLINE_DIRECTORY": folder / "comet_ml",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow/mlflow.db",
        "TRACKIO_DIR": folder / "trackio",
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
    for name in ("clearml", "comet_ml", "mlflow", "swanlab", "wandb"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return {
        "comet_ml": {"online": False},
        "dvclive": {"dir": str(folder / "dvclive"), "save_dvc_exp": False, "dvcyaml": False},
        "mlflow": {"logging_dir": (folder / "mlflow" / "artifacts").as_uri()},
        "swanlab": {"mode": "offline", "log_dir": str(folder / "swanlab")},
        "wandb": {"mode": "offline", "dir": str(folder / "wandb")},
    }


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[:1024], dtype=torch.float32) / 16.0, torch.tensor(labels[:1024]))


def train(log_with: list[LoggerType], folder: Path, epochs: int, lr: float, online: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {} if online else offline(folder)
    accelerator = Accelerator(log_with=log_with, project_dir=folder)
    set_seed(7)
    config = {
        "lr": lr,
        "epochs": epochs,
        "model": {"hidden": 32, "activation": nn.GELU, "dropout": None},
        "milestones": [1, 2],
        "device": accelerator.device,
        "processes": accelerator.num_processes,
    }
    accelerator.init_trackers(PROJECT, config=config, init_kwargs=settings)

    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(digits(), batch_size=128 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    history, step = [], 0
    for epoch in range(epochs):
        for images, labels in loader:
            logits = model(images)
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            mean_loss = accelerator.reduce(loss.detach(), "mean")
            accuracy = accelerator.gather_for_metrics(logits.argmax(dim=1) == labels).float().mean()
            # Tensors are copied to the host in the background.
            accelerator.log({"loss": mean_loss, "accuracy": accuracy, "epoch": epoch}, step=step)
            history.append({"step": step, "loss": mean_loss.item(), "accuracy": accuracy.item(), "epoch": epoch})
            step += 1
    accelerator.log_images({"input": images[:1].reshape(1, 1, 8, 8)}, step=step)
    accelerator.log_table(
        "predictions", columns=["label", "predicted"], data=torch.stack([labels, logits.argmax(1)], 1)[:4].tolist()
    )
    if accelerator.is_main_process:
        folder.joinpath("history.json").write_text(json.dumps(history))
        accelerator.log_artifact(folder / "history.json")
        print(
            f"logged {len(history)} steps to {', '.join(tracker.name for tracker in accelerator.trackers)} in {folder}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log_with", nargs="+", default=["jsonl"], help="tracker names, or all (default: jsonl)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/tracking"), help="output directory (default: runs/tracking)"
    )
    parser.add_argument("--epochs", type=int, default=2, help="epochs (default: 2)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate (default: 0.5)")
    parser.add_argument("--online", action="store_true", help="let trackers use their servers")
    arguments = parser.parse_args()
    trackers = [LoggerType(name) for name in arguments.log_with]
    train(trackers, arguments.output_dir, arguments.epochs, arguments.lr, arguments.online)
