"""Programs that train: evolution, worlds for agents, diffusion, entities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import support
import torch
from harness import WORLD, Cases, as_json, weights
from torch import nn

cases = Cases()


@cases((1, 2))
def x_evolution(folder: Path) -> Any:
    """`EvoStrategy` of a small network: the fitness of each generation, the weights, the files of its checkpoints"""
    from x_evolution import EvoStrategy

    inputs, target = torch.randn(16, 4), torch.randn(16, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def environment(candidate: nn.Module) -> float:
        return -(candidate(inputs) - target).square().mean().item()

    fitnesses: list[Any] = []
    strategy = EvoStrategy(
        model,
        environment=environment,
        num_generations=5,
        noise_population_size=6,
        learning_rate=0.05,
        cpu=True,
        verbose=False,
        checkpoint_every=2,
        checkpoint_path=str(folder / "checkpoints"),
        on_generation=lambda *args, **kwargs: fitnesses.append(args),
    )
    strategy()
    found = support.file_digests(folder / "checkpoints") if (folder / "checkpoints").exists() else {}
    return {"weights": weights(model.state_dict()), "fitnesses": as_json(fitnesses), "files": sorted(found)}


@cases((1, 2))
def dreamer4(folder: Path) -> Any:
    """`VideoTokenizerTrainer` on videos of moving digits: weights and the files of its checkpoints"""
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
    from dreamer4.dreamer4 import VideoTokenizer
    from dreamer4.trainers import VideoTokenizerTrainer

    images, _ = support.digits(12)
    videos = torch.stack([torch.roll(images, step, dims=-1) for step in range(3)], dim=2).repeat(1, 3, 1, 2, 2)

    model = VideoTokenizer(
        16,
        dim_latent=8,
        patch_size=8,
        image_height=16,
        image_width=16,
        num_latent_tokens=4,
        encoder_depth=1,
        decoder_depth=1,
        attn_heads=2,
        attn_dim_head=8,
        lpips_loss_weight=0.0,
    )
    trainer = VideoTokenizerTrainer(
        model,
        Videos(videos),
        batch_size=2,
        num_train_steps=4,
        cpu=True,
        grad_accum_every=2,
        checkpoint_every=2,
        checkpoint_folder=str(folder / "checkpoints"),
        accelerate_kwargs={
            # Both libraries have this order on two processes.
            "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=WORLD == 2),
            # Some layers take no part in the loss of a step, and DDP has to be told of it.
            "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)],
        },
    )
    trainer()
    return {"weights": weights(model.state_dict()), "files": sorted(support.file_digests(folder / "checkpoints"))}


class Videos(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


@cases((1, 2))
def diffsynth(folder: Path) -> Any:
    """`launch_training_task` with accumulation on digits, and its `ModelLogger`: losses, weights, files"""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from diffsynth.diffusion.logger import ModelLogger
    from diffsynth.diffusion.runner import launch_training_task
    from diffsynth.diffusion.training_module import DiffusionTrainingModule

    class Denoiser(DiffusionTrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 64))
            self.losses: list[float] = []

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            noise = torch.randn_like(data)
            loss = (self.net((data + noise)[None]).view_as(noise) - noise).square().mean()
            self.losses.append(loss.item())
            return loss

    def trained(seedable: bool) -> Any:
        torch.manual_seed(0)
        dataset, model = Videos(support.digits(12)[0]), Denoiser()
        dataset.load_from_cache = False  # type: ignore[attr-defined]
        models = folder / f"models-{seedable}"
        order = DataLoaderConfiguration(use_seedable_sampler=seedable)
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, dataloader_config=order)
        logger = ModelLogger(str(models))
        launch_training_task(accelerator, dataset, model, logger, learning_rate=1e-2, num_workers=0, num_epochs=2)
        accelerator.wait_for_everyone()
        return {
            "losses": model.losses,
            "weights": weights(model.state_dict()),
            "files": support.file_digests(models),
        }

    return {"default order": trained(False), "seedable order": trained(True)}


@cases((1, 2))
def blackbox_gradient_sensing(folder: Path) -> Any:
    """`BlackboxGradientSensing` of an actor in a small environment: weights"""
    import numpy
    from blackbox_gradient_sensing import BlackboxGradientSensing
    from blackbox_gradient_sensing.bgs import Actor

    class Environment:
        def reset(self, **kwargs: Any) -> Any:
            self.state, self.steps = numpy.ones(4, dtype=numpy.float32), 0
            return self.state, {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            push = (float(numpy.asarray(action).reshape(-1)[0]) - 0.5) / 10
            self.state = (self.state * 0.9 + push).astype(numpy.float32)
            return self.state, float(-numpy.square(self.state).sum()), self.steps >= 5, False, {}

    actor = Actor(dim_state=4, num_actions=2, hidden_dim=8)
    sensing = BlackboxGradientSensing(
        actor,
        noise_pop_size=6,
        num_selected=2,
        num_rollout_repeats=1,
        num_env_interactions=3,
        cpu=True,
        torch_compile_actor=False,
        show_progress=False,
    )
    sensing(Environment())
    return {"weights": weights(actor.state_dict())}


@cases((1, 2))
def tiny_recursive_model(folder: Path) -> Any:
    """`Trainer` of a small mixer on sequences that are reversed, with EMA: weights"""
    from tiny_recursive_model import MLPMixer1D, TinyRecursiveModel
    from tiny_recursive_model.trainer import Trainer

    class Reversed(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            sequence = (torch.arange(8) * (index + 1)) % 16
            return sequence, sequence.flip(0)

    model = TinyRecursiveModel(dim=16, num_tokens=16, network=MLPMixer1D(dim=16, depth=1, seq_len=8))
    Trainer(model, Reversed(), batch_size=4, epochs=1, max_recurrent_steps=3, warmup_steps=2, cpu=True)()
    return {"weights": weights(model.state_dict())}
