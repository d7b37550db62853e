"""Diffusers: a training loop in the manner of its examples, and pipelines that are offloaded to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from harness import WORLD, Cases, StepClock, files, repeated, timed, weights
from sklearn.datasets import load_digits
from transformers import CLIPTextConfig, CLIPTextModel

cases = Cases()
DIGITS = torch.tensor(load_digits().images[:40], dtype=torch.float32)[:, None] / 8 - 1


def unet() -> UNet2DModel:
    torch.manual_seed(1)
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


class Run:
    """A training run of an unconditional diffusion model with an average of its weights."""

    def __init__(self, folder: Path, **options: Any) -> None:
        set_seed(5)
        options.setdefault("dataloader_config", DataLoaderConfiguration(use_seedable_sampler=True))
        project = ProjectConfiguration(project_dir=str(folder))
        self.accelerator = accelerator = Accelerator(cpu=True, project_config=project, **options)
        model = unet()
        self.ema = EMAModel(
            model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(DIGITS, batch_size=4 // WORLD, shuffle=True)
        schedule = get_scheduler(
            "cosine", optimizer=optimizer, num_warmup_steps=2 * WORLD, num_training_steps=20 * WORLD
        )
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)
        self.model, self.optimizer, self.loader, self.schedule = accelerator.prepare(model, optimizer, loader, schedule)
        self.ema.to(accelerator.device)
        self.noise = DDPMScheduler(num_train_timesteps=50)
        self.losses: list[Any] = []

    def save(self, models: list[Any], states: list[Any], output: str) -> None:
        if self.accelerator.is_main_process:
            self.ema.save_pretrained(Path(output) / "unet_ema")
            for model in models:
                self.accelerator.unwrap_model(model).save_pretrained(Path(output) / "unet")
                states.pop()

    def load(self, models: list[Any], source: str) -> None:
        loaded = EMAModel.from_pretrained(str(Path(source) / "unet_ema"), UNet2DModel)
        self.ema.load_state_dict(loaded.state_dict())
        while models:
            model = self.accelerator.unwrap_model(models.pop())
            stored = UNet2DModel.from_pretrained(source, subfolder="unet")
            model.register_to_config(**stored.config)
            model.load_state_dict(stored.state_dict())

    def train(self, epochs: int, save_at: int = 0, folder: Path | None = None, skip: int = 0) -> None:
        clock = StepClock()
        for epoch in repeated(epochs):
            loader = self.loader
            if epoch == 0 and skip:
                loader = self.accelerator.skip_first_batches(loader, skip)
            self.model.train()
            for images in loader:
                noise = torch.randn(images.shape)
                steps = torch.randint(0, 50, (images.shape[0],))
                noisy = self.noise.add_noise(images, noise, steps)
                with self.accelerator.accumulate(self.model):
                    loss = F.mse_loss(self.model(noisy, steps).sample.float(), noise)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.ema.step(self.model.parameters())
                self.losses.append(self.accelerator.gather(loss.detach()).mean())
                clock()
                if save_at and len(self.losses) == save_at:
                    self.accelerator.save_state(str(folder))
                    clock.pause()
            clock.pause()

    def result(self) -> dict[str, Any]:
        return {
            "losses": [loss.item() for loss in self.losses],
            "rate": self.schedule.get_last_lr(),
            "weights": weights(self.accelerator.unwrap_model(self.model).state_dict()),
            "average": weights({str(i): value for i, value in enumerate(self.ema.shadow_params)}),
        }


def _training(**options: Any) -> Any:
    def case(folder: Path) -> Any:
        run = Run(folder, **options)
        run.train(2)
        return run.result()

    return case


cases.add("diffusers_training", _training())
cases.add("diffusers_training_accumulation", _training(gradient_accumulation_steps=2))
cases.add("diffusers_training_no_seedable_sampler", _training(dataloader_config=DataLoaderConfiguration()))
cases.add("diffusers_training_bf16", _training(mixed_precision="bf16"))


@cases()
def diffusers_training_resumed(folder: Path) -> Any:
    """Saved in mid-epoch with the hooks of diffusers' examples, and resumed with skip_first_batches."""
    target = folder / "checkpoint"
    run = Run(folder)
    run.train(2, save_at=4, folder=target)
    whole = run.result()
    run.accelerator.free_memory()
    again = Run(folder)
    again.accelerator.load_state(str(target))
    again.train(2, skip=4)
    return {
        **whole,
        "whole": whole["weights"],
        "resumed": again.result()["weights"],
        "resumed losses": [loss.item() for loss in again.losses],
        "same losses": [abs(a.item() - b) for a, b in zip(again.losses, whole["losses"][4:], strict=True)],
        "average resumed": again.result()["average"],
        "files": files(target),
    }


@cases()
def diffusers_training_pipeline(folder: Path) -> Any:
    """Images from the averaged weights, as the examples sample after an epoch, saved and loaded."""
    run = Run(folder)
    run.train(1)
    model = run.accelerator.unwrap_model(run.model)
    run.ema.store(model.parameters())
    run.ema.copy_to(model.parameters())
    pipeline = DDPMPipeline(model, DDPMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(2, torch.Generator().manual_seed(0), num_inference_steps=4, output_type="np").images
    if run.accelerator.is_main_process:
        pipeline.save_pretrained(folder / "pipeline")
    run.accelerator.wait_for_everyone()
    again = DDPMPipeline.from_pretrained(folder / "pipeline") if run.accelerator.is_main_process else pipeline
    run.ema.restore(model.parameters())
    return {
        "images": torch.as_tensor(images),
        "weights": weights(model.state_dict()),
        "loaded": weights(again.unet.state_dict()) if run.accelerator.is_main_process else {},
    }


def pictures() -> StableDiffusionPipeline:
    """Stable Diffusion in miniature, without a tokenizer: the tokens are given."""
    torch.manual_seed(2)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=12, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    image = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    codec = AutoencoderKL(
        block_out_channels=(8, 16), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        codec.eval(), text.eval(), None, image.eval(), DDIMScheduler(num_train_timesteps=50), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def drawn(pipeline: StableDiffusionPipeline) -> torch.Tensor:
    tokens = torch.tensor([[1, 5, 8, 13, 2]])
    with torch.no_grad():
        prompt = pipeline.text_encoder(tokens)[0]
    made = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=torch.zeros_like(prompt), height=16, width=16,
        num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="pt",
    )  # fmt: skip
    return made.images


def states(pipeline: StableDiffusionPipeline) -> dict[str, Any]:
    parts = {"text": pipeline.text_encoder, "unet": pipeline.unet, "vae": pipeline.vae}
    return {
        name: {
            "meta": sum(parameter.is_meta for parameter in part.parameters()),
            "hooks": sum(hasattr(module, "_hf_hook") for module in part.modules()),
        }
        for name, part in parts.items()
    }


def _offloaded(enable: str) -> Any:
    def case(folder: Path) -> Any:
        pipeline = pictures()
        plain = drawn(pipeline)
        # Given as the device to compute on, the CPU runs through the same hooks as an accelerator.
        getattr(pipeline, enable)(device="cpu")
        enabled = states(pipeline)
        images = timed(lambda: drawn(pipeline), 6)
        pipeline.maybe_free_model_hooks()
        after = states(pipeline)
        pipeline.remove_all_hooks()
        return {
            "images": images,
            "equal to the model in memory": [torch.equal(plain, images)],
            "enabled": enabled,
            "after": after,
            "removed": states(pipeline),
            "device": str(pipeline.device),
        }

    return case


cases.add("diffusers_model_cpu_offload", _offloaded("enable_model_cpu_offload"), (1,))
cases.add("diffusers_sequential_cpu_offload", _offloaded("enable_sequential_cpu_offload"), (1,))


@cases((1,))
def diffusers_from_pretrained(folder: Path) -> Any:
    """A model of diffusers is created without memory, and loaded with layers on the disk."""
    pictures().unet.save_pretrained(folder / "unet", max_shard_size="40KB")
    plain = UNet2DConditionModel.from_pretrained(folder / "unet").eval()
    given = (torch.ones(1, 4, 8, 8), 3, torch.ones(1, 5, 16))
    with torch.no_grad():
        expected = plain(*given).sample
        results = {}
        for name, options in {
            "auto": {"device_map": "auto"},
            "disk": {
                "device_map": "auto", "max_memory": {"cpu": "60KB"}, "offload_folder": str(folder / "offload"),
                "offload_state_dict": True,
            },
        }.items():  # fmt: skip
            model = UNet2DConditionModel.from_pretrained(folder / "unet", **options).eval()
            results[name] = timed(lambda model=model: model(*given).sample)
            results[f"{name} map"] = {key: str(value) for key, value in model.hf_device_map.items()}
    same = [torch.allclose(expected, results[name], atol=1e-6) for name in ("auto", "disk")]
    return {**results, "equal to the model in memory": same}
