"""Generate images on several processes, in batches, with one random generator for each image.

    accel launch --cpu --num_processes 2 examples/distributed_inference/image.py --output_dir runs/images

The model is a small denoiser with random weights: it stands for a diffusion pipeline. Seeds belong to images instead of
ranks, so any number of processes writes the same images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy
import torch
from torch import nn

from accel import PartialState
from accel.utils import set_seed

STEPS, BATCH_SIZE = 4, 4


def denoise(model: nn.Module, seeds: list[int], device: torch.device) -> torch.Tensor:
    """Images of shape (N, 3, 16, 16) with values from 0 to 1."""
    images = torch.stack([torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    images = images.to(device)
    with torch.no_grad():
        for step in range(STEPS):
            images = images - model(images) / (STEPS - step)
    return images.sigmoid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/images"), help="default: runs/images")
    parser.add_argument("--images", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    state = PartialState()
    set_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)).to(state.device)
    options.output_dir.mkdir(parents=True, exist_ok=True)

    with state.split_between_processes(list(range(options.images))) as seeds:
        for start in range(0, len(seeds), BATCH_SIZE):
            batch = seeds[start : start + BATCH_SIZE]
            for seed, image in zip(batch, denoise(model, batch, state.device), strict=True):
                numpy.save(options.output_dir / f"{seed:04d}.npy", image.cpu().numpy())
    state.wait_for_everyone()  # until all ranks have written their files
    files = sorted(options.output_dir.glob("*.npy"))
    mean = numpy.mean([numpy.load(file).mean() for file in files])
    state.print(f"{len(seeds)} images on rank 0, {len(files)} files")
    state.print(f"mean brightness: {mean:.6f}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
