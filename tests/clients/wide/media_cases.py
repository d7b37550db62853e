"""Programs for audio, images, video and agents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import support
import torch
from harness import RANK, WORLD, Cases, weights
from torch import nn

cases = Cases()


@cases((1,))
def audiodiffusion(folder: Path) -> Any:
    """`AudioDiffusion` of a pipeline that is loaded from a folder: its weights, the spectrogram that it makes"""
    from audiodiffusion import AudioDiffusion
    from audiodiffusion.mel import Mel
    from audiodiffusion.pipeline_audio_diffusion import AudioDiffusionPipeline
    from diffusers import DDIMScheduler, UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    net = UNet2DModel(32, 1, 1, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **blocks)
    pipeline = AudioDiffusionPipeline(vqvae=None, unet=net, mel=Mel(32, 32, n_fft=512), scheduler=DDIMScheduler())
    pipeline.save_pretrained(folder / "pipeline")
    program = AudioDiffusion(str(folder / "pipeline"), cuda=False, progress_bar=None)
    program.pipe.set_progress_bar_config(disable=True)
    image, (rate, sound) = program.generate_spectrogram_and_audio(steps=3, generator=torch.Generator().manual_seed(1))
    return {
        "image": torch.tensor(list(image.tobytes())),
        "rate": rate,
        "length": len(sound),  # librosa gives it phases that no seed determines
        "weights": weights(program.pipe.unet.state_dict()),
    }


@cases((1,))
def deepcache(folder: Path) -> Any:
    """`DeepCacheSDHelper` on a small Stable Diffusion, in memory and with `enable_model_cpu_offload`: images"""
    from DeepCache import DeepCacheSDHelper
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        )
    )
    net = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    coder = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    pipeline = StableDiffusionPipeline(
        coder, text, support.tokenizer(), net, DDIMScheduler(), None, None, requires_safety_checker=False
    )
    pipeline.save_pretrained(folder / "pipeline")
    pipeline = StableDiffusionPipeline.from_pretrained(folder / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    helper = DeepCacheSDHelper(pipe=pipeline)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    result = {}
    for name in ("memory", "offloaded"):
        if name == "offloaded":
            pipeline.enable_model_cpu_offload(device="cpu")
        made = pipeline("a digit", num_inference_steps=4, output_type="pt", generator=torch.Generator().manual_seed(1))
        result[name] = made.images
    return result


@cases((1, 2))
def phenaki_pytorch(folder: Path) -> Any:
    """`CViViTTrainer` on images of digits, with EMA, with its random flips and without: losses, weights, files"""
    from PIL import Image

    images, _ = support.digits(24)
    (folder / f"images-{RANK}").mkdir()
    for index, image in enumerate(images):
        grey = Image.fromarray((image[0] * 255).byte().numpy()).resize((16, 16))
        grey.convert("RGB").save(folder / f"images-{RANK}" / f"{index:02}.png")
    return {"flips": trained_cvivit(folder, flips=True), "no flips": trained_cvivit(folder, flips=False)}


def trained_cvivit(folder: Path, flips: bool) -> Any:
    from accelerate.utils import DistributedDataParallelKwargs
    from phenaki_pytorch.cvivit import CViViT
    from phenaki_pytorch.cvivit_trainer import CViViTTrainer
    from torchvision.transforms import ToTensor

    torch.manual_seed(0)
    model = CViViT(
        dim=16,
        codebook_size=64,
        image_size=16,
        patch_size=8,
        temporal_patch_size=1,
        spatial_depth=1,
        temporal_depth=1,
        dim_head=8,
        heads=2,
        discr_base_dim=4,
        discr_attn_res_layers=(),
        vgg=nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)),
    )
    results = folder / f"results-{RANK}-{flips}"
    # Some layers take no part in the loss of a step, and DDP has to be told of it.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    trainer = CViViTTrainer(
        model,
        num_train_steps=3,
        batch_size=2,
        folder=str(folder / f"images-{RANK}"),
        train_on_images=True,
        grad_accum_every=2,
        save_results_every=2,
        save_model_every=2,
        results_folder=str(results),
        accelerate_kwargs={"cpu": True, "kwargs_handlers": [unused]},
    )
    if not flips:
        trainer.ds.dataset.transform = ToTensor()
    losses: list[Any] = []
    trainer.train(losses.append)
    return {
        "losses": [{key: value for key, value in entry.items() if "loss" in key} for entry in losses],
        "weights": weights(trainer.accelerator.unwrap_model(trainer.vae).state_dict()),
        "files": sorted(support.file_digests(results)),
    }


@cases((1, 2))
def evolutionary_policy_optimization(folder: Path) -> Any:
    """`EPO` of agents in its own small environment, for two cycles: weights, genes, the file of `Agent.save`"""
    from evolutionary_policy_optimization import EPO, Env, create_agent

    agent = create_agent(
        dim_state=6,
        num_latents=8,
        dim_latent=8,
        actor_num_actions=3,
        actor_dim=16,
        actor_mlp_depth=1,
        critic_dim=16,
        critic_mlp_depth=1,
        batch_size=4,
        accelerate_kwargs={"cpu": True},
        latent_gene_pool_kwargs={"frac_natural_selected": 0.5, "frac_tournaments": 0.75},
        quiet=True,
    )
    program = EPO(agent, episodes_per_latent=1, max_episode_length=5)
    program(Env((6,)), num_learning_cycles=2)
    agent.save(str(folder / f"agent-{RANK}.pt"))
    saved = torch.load(folder / f"agent-{RANK}.pt", weights_only=False)
    return {name: weights(saved[name]) for name in ("actor", "critic", "critic_ema", "latents")}


@cases((1, 2))
def smalldiffusion(folder: Path) -> Any:
    """`training_loop` of a denoiser of digits, and `samples` of it: losses, weights, images"""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from smalldiffusion import ScheduleLogLinear, TimeInputMLP, samples, training_loop

    def trained(seedable: bool) -> Any:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        images = support.digits(24)[0].flatten(1)
        loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
        schedule = ScheduleLogLinear(N=20, sigma_min=0.02, sigma_max=2)
        model = TimeInputMLP(dim=64, hidden_dims=(32, 32))
        losses = [step.loss.item() for step in training_loop(loader, model, schedule, accelerator, epochs=2)]
        *_, made = samples(model, schedule.sample_sigmas(5), batchsize=3, accelerator=accelerator)
        return {"losses": losses, "weights": model, "images": made}

    return {"default order": trained(False), "seedable order": trained(True)}


@cases((1, 2))
def speechtokenizer(folder: Path) -> Any:
    """`SpeechTokenizerTrainer` on tones, with a discriminator and a validation: weights, files"""
    import numpy
    import soundfile
    import torchaudio
    from speechtokenizer import SpeechTokenizer, SpeechTokenizerTrainer
    from speechtokenizer.trainer import trainer as program

    def load(path: str) -> tuple[torch.Tensor, int]:  # torchaudio's needs the libraries of FFmpeg
        sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return torch.from_numpy(sound.T), rate

    torchaudio.load = load
    here = folder / f"rank-{RANK}"
    here.mkdir()
    generator, lines = numpy.random.default_rng(0), []
    for index in range(8):
        sound = 0.3 * numpy.sin(numpy.arange(1280) * 0.02 * (index + 1))
        soundfile.write(here / f"{index}.wav", sound, 8000)
        numpy.save(here / f"{index}.npy", generator.random((80, 8), dtype=numpy.float32))
        lines.append(f"{here / f'{index}.wav'}\t{here / f'{index}.npy'}")
    (here / "train.txt").write_text("\n".join(lines))
    (here / "valid.txt").write_text("\n".join(lines[:2]))
    # Only the main process validates, over a loader and a model for all: on two, neither library gets past it.
    validates = 3 if WORLD == 1 else 1000
    sizes = {
        "n_filters": 4, "dimension": 8, "strides": [4, 2, 2], "lstm_layers": 1, "bidirectional": True,
        "dilation_base": 2, "residual_kernel_size": 3, "n_residual_layers": 1, "activation": "ELU",
        "sample_rate": 8000, "n_q": 2, "semantic_dimension": 8, "codebook_size": 16,
    }  # fmt: skip
    config = {
        **sizes, "seed": 0, "log_steps": 2, "stdout_steps": 2, "save_model_steps": validates, "num_ckpt_keep": 2,
        "epochs": 2, "num_warmup_steps": 0, "batch_size": 2,
        "mel_loss_lambdas": [1.0], "commitment_loss_lambda": 1.0, "recon_loss_lambda": 1.0,
        "distill_loss_lambda": 1.0, "n_fft": 256, "num_mels": 10, "hop_size": 64, "win_size": 256, "fmin": 0,
        "fmax": 4000, "fmax_for_loss": 4000, "segment_size": 640, "train_files": str(here / "train.txt"),
        "valid_files": str(here / "valid.txt"), "num_workers": 0, "learning_rate": 1e-3,
        "intial_learning_rate": 1e-4, "wd": 0.0, "betas": [0.9, 0.99], "showpiece_num": 0,
    }  # fmt: skip

    def trained(name: str) -> Any:
        torch.manual_seed(0)
        random.seed(0)
        model = SpeechTokenizer(sizes)
        config["results_folder"] = str(here / name)
        trainer = SpeechTokenizerTrainer(model, {"small": Discriminator()}, config, accelerate_kwargs={"cpu": True})
        trainer.train()
        others = {key: weights(value.state_dict()) for key, value in trainer.discriminators.items()}
        found = [name for name in support.file_digests(here / name) if "tfevents" not in name]
        return {"weights": weights(trainer.generator.state_dict()), "discriminators": others, "files": sorted(found)}

    result = {"default order": trained("shuffled")}
    make = program.get_dataloader
    program.get_dataloader = lambda *args, **more: make(*args, **{**more, "shuffle": False})
    return {**result, "in order": trained("in order")}


class Discriminator(nn.Module):
    """A small one with the results of SpeechTokenizer's: scores and feature maps of real and made sounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 4, 9, 4), nn.Conv1d(4, 1, 3)

    def forward(self, real: torch.Tensor, made: torch.Tensor) -> Any:
        features = [torch.relu(self.first(sound)) for sound in (real, made)]
        scores = [[self.last(feature)] for feature in features]
        return *scores, [[features[0]]], [[features[1]]]


@cases((1, 2))
def f5_tts(folder: Path) -> Any:
    """`Trainer` of a small DiT on spectrograms, with accumulation and EMA: the model, EMA and schedule it saves"""
    from f5_tts.model import CFM, DiT, Trainer

    net = DiT(dim=32, depth=1, heads=2, dim_head=16, ff_mult=1, mel_dim=20, text_num_embeds=256, dropout=0.0)
    model = CFM(net, mel_spec_kwargs={"n_mel_channels": 20})
    trainer = Trainer(
        model,
        epochs=2,
        learning_rate=1e-3,
        num_warmup_updates=1,
        save_per_updates=2,
        last_per_updates=4,
        checkpoint_path=str(folder / "checkpoints"),
        # On two processes by frames, in the order of its own sampler, which both libraries keep.
        batch_size_per_gpu=2 if WORLD == 1 else 40,
        batch_size_type="sample" if WORLD == 1 else "frame",
        max_samples=2,
        grad_accumulation_steps=2,
        logger=None,
        accelerate_kwargs={"cpu": True},
        ema_kwargs={"beta": 0.9, "update_after_step": 0, "update_every": 1},
    )
    trainer.train(Tones(16), num_workers=1)
    result: dict[str, Any] = {"weights": weights(trainer.accelerator.unwrap_model(trainer.model).state_dict())}
    if RANK == 0:
        saved = torch.load(folder / "checkpoints" / "model_last.pt", weights_only=False)
        result |= {"ema": weights(saved["ema_model_state_dict"]), "update": saved["update"]}
        result |= {"schedule": saved["scheduler_state_dict"]["_last_lr"]}
        result |= {"files": sorted(support.file_digests(folder / "checkpoints"))}
    return result


@cases((1, 2))
def gigagan_pytorch(folder: Path) -> Any:
    """`GigaGAN` without texts on digits, with EMA and gradient penalty: weights of both networks, its images"""
    from gigagan_pytorch import GigaGAN

    more = {"dim_max": 16, "image_size": 16, "unconditional": True, "num_conv_kernels": 2}
    program = GigaGAN(
        generator={
            "dim_capacity": 4, "style_network": {"dim": 8, "depth": 1}, "dim_latent": 8,
            "self_attn_resolutions": (8,), "self_attn_dim_head": 8, "self_attn_heads": 1,
            "cross_attn_resolutions": (), **more,
        },
        discriminator={
            "dim_capacity": 4, "attn_resolutions": (8,), "attn_dim_head": 8, "attn_heads": 1,
            "multiscale_input_resolutions": (8,), **more,
        },
        apply_gradient_penalty_every=2,
        num_samples=4,
        save_and_sample_every=2,
        model_folder=str(folder / "models"),
        results_folder=str(folder / "results"),
        accelerate_kwargs={"cpu": True},
    )  # fmt: skip
    images = support.digits(24)[0].repeat(1, 3, 2, 2)
    # Both libraries have the order of a loader that does not shuffle on two processes.
    program.set_dataloader(torch.utils.data.DataLoader(images, batch_size=2, shuffle=WORLD == 1))
    program(steps=3, grad_accum_every=2)
    return {
        "generator": weights(program.unwrapped_G.state_dict()),
        "discriminator": weights(program.unwrapped_D.state_dict()),
        "ema": weights(program.G_ema.state_dict()),
        "files": sorted(support.file_digests(folder / "results")),
    }


class Tones(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Spectrograms of 20 channels and 12 to 19 frames, with texts."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = [torch.rand(20, 12 + index % 8, generator=generator) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def get_frame_len(self, index: int) -> int:
        return self.rows[index].shape[1]

    def __getitem__(self, index: int) -> Any:
        return {"mel_spec": self.rows[index], "text": support.SENTENCES[index][:10]}


@cases((1, 2))
def xztrainer(folder: Path) -> Any:
    """`XZTrainer` of a classifier of digits, with accumulation, metrics and its saves: weights, files, resumed run"""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
    from torchmetrics import MeanMetric
    from xztrainer.model import XZTrainerConfig
    from xztrainer.trainable import XZTrainable
    from xztrainer.trainer import XZTrainer

    class Digits(XZTrainable):
        def step(self, context: Any, data: Any) -> Any:
            logits = context.model(data["image"])
            loss = nn.functional.cross_entropy(logits, data["label"])
            return loss, {"loss": loss, "logits": logits}

        def create_metrics(self, context_type: Any) -> Any:
            return {"loss": MeanMetric()}

        def update_metrics(self, context_type: Any, model_outputs: Any, metrics: Any) -> None:
            metrics["loss"].update(model_outputs["loss"])

    images, labels = support.digits(40)
    rows = [{"image": image.flatten(), "label": label} for image, label in zip(images, labels, strict=True)]
    # Both libraries have this order on two processes.
    order = DataLoaderConfiguration(use_seedable_sampler=WORLD == 2)
    result = {}
    # The second run continues from the last save of the first. On two processes the first ends the process group.
    for epochs in (1, 2)[: 2 // WORLD]:
        torch.manual_seed(0)
        project = ProjectConfiguration(str(folder / "project"))
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, project_config=project, dataloader_config=order
        )
        config = XZTrainerConfig(
            "digits",
            minibatch_size=4,
            minibatch_size_eval=4,
            epochs=epochs,
            optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
            scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
            dataloader_num_workers=0,
            dataloader_persistent_workers=False,
            log_steps=1,
            eval_steps=2,
            save_steps=2,
            save_keep_n=2,
        )
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        XZTrainer(config, model, Digits(), accelerator).train(rows[:32], rows[32:])
        names = sorted(path.relative_to(folder).as_posix() for path in (folder / "project").glob("checkpoint/*/*"))
        result[f"epochs {epochs}"] = {"weights": weights(model.state_dict()), "saves": names}
        accelerator.free_memory()
    return result
