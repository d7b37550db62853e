"""Models, data and training of benchmarks/combinations.py: on any ranks, and in one process of plain PyTorch."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel import Accelerator, CheckpointError, DeepSpeedPlugin, FullyShardedDataParallelPlugin, LocalSGD
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel.parallel.axis_settings import SPLIT_BACKWARD, PipelineParallelConfig
from accel.parallel.config import ParallelismConfig
from accel.utils import DataLoaderConfiguration, TorchDynamoPlugin
from accel_state import context
from accel_state.errors import ConfigurationError

VOCABULARY, LENGTH, BATCH = 16, 16, 8
BLOCKS = {
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "mistral": "MistralDecoderLayer",
    "gpt2": "GPT2Block",
    "mixtral": "MixtralDecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
}
ADAPTED = ("q_proj", "v_proj", "c_attn")
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
# What a batch has besides the arguments of the model; the values describe the whole batch.
VALUES = ("ragged", "total", "count", "text")
SECOND_STEPS = 3  # batches of the second loader, which ends within windows
TWO_LOADERS = ("two loaders", "second loader first")
# Compression without loss: the rank is that of the largest matrix.
POWER = {
    **{"matrix_approximation_rank": 32, "min_compression_rate": 1e-6, "start_powerSGD_iter": 2},
    **{"warm_start": False, "orthogonalization_epsilon": 0},
}


@dataclass(frozen=True)
class Setup:
    """A strategy with its settings, on a number of ranks."""

    name: str  # "ddp", "fsdp2", "zero3", or axes with their sizes: "dp_shard2_tp2"
    ranks: int
    units: bool = True  # FSDP wraps blocks, not only the model
    format: str = "FULL_STATE_DICT"
    schedule: str = "1f1b"

    @property
    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.name.split("-") if "-" in self.name or self.name[-1:].isdigit() else ():
            axis, size = part.rstrip("0123456789"), part[len(part.rstrip("0123456789")) :]
            if axis in AXES:
                found[axis] = int(size)
        return found

    @property
    def parts(self) -> int:
        """How many ranks get batches of their own."""
        sizes = self.sizes
        return sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1) if sizes else self.ranks


@dataclass(frozen=True)
class Draw:
    """One combination."""

    number: int
    setup: Setup
    model: str
    steps: int = 4
    window: int = 1
    clip: str = "norm"
    precision: str = "no"
    features: tuple[str, ...] = ()
    resumes_under: Setup | None = None  # where it continues after half of the steps

    def has(self, *features: str) -> bool:
        return not set(features).isdisjoint(self.features)

    @property
    def is_short(self) -> bool:
        """Whether the second rank has half of the samples in its last batch, which two ranks divide without padding."""
        return self.has("values") and self.has("dispatched") and self.setup.parts == 2 and "pp" not in self.setup.sizes

    @property
    def has_masters(self) -> bool:
        """Whether parameters of half precision that are trained have a copy in fp32."""
        shards = self.setup.name.startswith(("fsdp", "zero")) or "dp_shard" in self.setup.sizes
        return self.has("bf16 base") and self.precision == "bf16" and shards

    def __str__(self) -> str:
        later = f" -> {self.resumes_under.name}/{self.resumes_under.ranks}" if self.resumes_under else ""
        wrap = "" if self.setup.units else " unwrapped"
        rest = [f"window={self.window}"] if self.window > 1 else []
        rest += [f"clip={self.clip}"] if self.clip != "norm" else []
        rest += [self.precision] if self.precision != "no" else []
        return f"{self.setup.name}/{self.setup.ranks}{wrap}{later} {self.model} {' '.join([*rest, *self.features])}"


class Normed(nn.Module):
    """Layers with batch normalisation, whose buffers follow the data of a rank."""

    _no_split_modules = ("Sequential",)

    def __init__(self, width: int = LENGTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen linear layer with an adapter, for environments without PEFT."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base(x)
        return found + self.up(self.down(x.to(self.down.weight.dtype))).to(found.dtype)


class Adapted(nn.Module):
    """Passes any arguments on, as PEFT's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def build(draw: Draw, seed: int, compiles: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = Normed() if draw.model == "batchnorm" else _language_model(draw)
    if draw.has("frozen"):
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("embed_tokens", "wte", "wpe", "layers.0.", "h.0.")):
                parameter.requires_grad_(False)
    if draw.has("bf16 base"):
        model.to(torch.bfloat16)
    if draw.has("lora"):
        model = _with_adapters(model)
    if draw.has("thaws", "thaws a group"):
        for parameter in block_of(model, 1):
            parameter.requires_grad_(False)
    if draw.has("checkpointing") and hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if draw.has("lora"):
            model.enable_input_require_grads()
    if draw.has("compiled") and compiles:
        model = torch.compile(model, backend="eager")
    return model


def _language_model(draw: Draw) -> nn.Module:
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    drop = 0.1 if draw.has("dropout") else 0.0
    common = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common["tie_word_embeddings"] = draw.has("tied")
    if draw.has("packed"):
        common["use_cache"] = False  # with a cache, Transformers takes packed documents for one
    if draw.model == "gpt2":
        config = transformers.GPT2Config(
            n_positions=64, n_embd=16, n_layer=4, n_head=4, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=0, **common
        )
        return transformers.GPT2LMHeadModel(config)
    experts = {
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 4},
    }
    config = getattr(transformers, f"{names[draw.model]}Config")(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **experts.get(draw.model, {}),
        **common,
    )
    return getattr(transformers, f"{names[draw.model]}ForCausalLM")(config)


def _with_adapters(model: nn.Module) -> nn.Module:
    if find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        names = [name for name in ADAPTED if any(key.endswith(name) for key, _ in model.named_modules())]
        if names:
            return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in ADAPTED:
            outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LowRank(module, inputs, outputs))
    return Adapted(model)


def block_of(model: nn.Module, number: int, adapters: bool = False) -> list[nn.Parameter]:
    """The parameters of a layer, or those of its adapters."""
    named = [item for item in model.named_parameters() if f"layers.{number}." in item[0] or f"h.{number}." in item[0]]
    return [item for name, item in named if not adapters or any(part in name for part in ("lora_", "down.", "up."))]


def samples(draw: Draw, second: bool = False) -> list[dict[str, torch.Tensor]]:
    """The data of all steps in order, or those of the second loader; the same for every setup."""
    count = SECOND_STEPS * BATCH if second else draw.steps * draw.window * BATCH
    if draw.is_short and not second:
        count -= BATCH // draw.setup.parts // 2
    generator = torch.Generator().manual_seed(3 + draw.number + 1000 * second)
    found = _samples(draw, count, generator)
    if draw.has("values"):
        for item, length in zip(found, torch.randint(1, 9, (count,), generator=generator).tolist(), strict=True):
            item["ragged"] = torch.full((length,), float(length))
    return found


def _samples(draw: Draw, count: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    if draw.model == "batchnorm":
        x = torch.randn(count, LENGTH, generator=generator)
        return [{"x": one, "labels": one.argmax()} for one in x]
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
    found = []
    kept = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator).tolist()
    for row, keep in zip(tokens, kept, strict=True):
        item = {"input_ids": row, "labels": row.clone()}
        if draw.has("masks") or draw.has("num_items"):
            item["labels"][keep:] = -100
        if draw.has("masks"):
            item["attention_mask"] = (torch.arange(LENGTH) < keep).long()
        if draw.has("packed"):
            item["position_ids"] = torch.arange(LENGTH) % (LENGTH // 2)
        found.append(item)
    return found


def stack(items: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([item[name] for item in items]) for name in arguments_of(items[0])}
    if "ragged" in items[0]:
        ragged = [item["ragged"] for item in items]
        total = sum(one.sum() for one in ragged)
        batch.update(ragged=ragged, total=total, count=len(items), text=str(float(total)))
    return batch


def merge(batch: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The samples of two batches in one."""
    merged = {name: torch.cat([batch[name], other[name]]) for name in arguments_of(batch)}
    if "ragged" in batch:
        merged |= {name: batch[name] + other[name] for name in ("ragged", "total", "count")}
        merged["text"] = str(float(batch["text"]) + float(other["text"]))
    return merged


def arguments_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name not in VALUES}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    if "x" in batch:
        loss = functional.cross_entropy(model(batch["x"]).float(), batch["labels"])
    else:
        loss = model(**arguments_of(batch)).loss
    if "ragged" in batch:  # a value of other samples makes another loss
        ragged = sum(float(one.sum()) for one in batch["ragged"])
        loss = loss * (1 + (ragged + float(batch["total"]) + float(batch["text"]) + 9 * batch["count"]) / 500)
    return loss


def items_in(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def optimizer_of(draw: Draw, model: nn.Module) -> torch.optim.Optimizer:
    later = set(map(id, block_of(model, 1))) if draw.has("thaws") else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad or id(parameter) in later]
    # Adam with a small eps makes steps of gradients that are zero but for rounding.
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4, fused=draw.has("fused") or None)


def change_trained(draw: Draw, model: nn.Module, optimizer: Any, step: int) -> None:
    """Freeze and unfreeze layers, before a step; a state is loaded where they are as in the step before."""
    if draw.has("freezes"):
        for parameter in block_of(model, 0 if draw.model == "batchnorm" else 2, adapters=draw.has("lora")):
            parameter.requires_grad_(step not in (1, 2))
    if draw.has("thaws", "thaws a group"):
        for parameter in block_of(model, 1):
            parameter.requires_grad_(step > 0)
    if draw.has("thaws a group") and step == 1:
        optimizer.add_param_group({"params": block_of(model, 1), "lr": 5e-3})


def with_feedback(residuals: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Half of a gradient and of what was kept, the other half of which is kept for the next step."""
    half = (gradient + residuals.get(name, 0)) / 2
    residuals[name] = half.clone()
    return half


def feedback_hook(names: dict[nn.Parameter, str]) -> Callable[..., Any]:
    """A communication hook for DDP whose state differs between ranks."""

    def hook(state: dict[str, Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.copy_(with_feedback(state, names[parameter], gradient))
        future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares them with classes, and these are strings
    return hook


class PlainFeedback:
    """What :func:`feedback_hook` does, which is linear, to the averages of all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.reduced = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self.residuals: dict[str, torch.Tensor] = {}

    def apply(self) -> None:
        if not all(item.requires_grad for item in self.reduced.values()):
            return  # DDP's reducer is not used, and all gradients are averaged after the backward pass
        for name, item in self.reduced.items():
            assert item.grad is not None
            item.grad = with_feedback(self.residuals, name, item.grad)


def clip(draw: Draw, model: nn.Module, tools: Any) -> list[float]:
    """Clip as the draw says; the norm before."""
    if draw.clip == "norm":
        return [float(tools.clip_grad_norm_(model.parameters(), 0.5))]
    if draw.clip == "value":
        tools.clip_grad_value_(model.parameters(), 0.02)
    return []


def pieces_of(draw: Draw, setup: Setup, step: int, data: list[dict[str, torch.Tensor]]) -> Iterator[Any]:
    """The micro batches of a step, and of each the batches of all parts."""
    size = BATCH // setup.parts

    def parts_of(rows: list[dict[str, torch.Tensor]], start: int) -> list[dict[str, Any]]:
        return [stack(rows[start + part * size : start + (part + 1) * size]) for part in range(setup.parts)]

    second = samples(draw, second=True) if draw.has(*TWO_LOADERS) else None
    for micro in range(step * draw.window, (step + 1) * draw.window):
        parts = parts_of(data, micro * BATCH)
        if second is not None:
            parts = list(map(merge, parts, parts_of(second, micro % SECOND_STEPS * BATCH)))
        yield parts


@dataclass
class Found:
    """What a run computed: the losses and norms of each step, and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    refused: str = ""
    error: str = ""


def plain(draw: Draw) -> Found:
    """One process of plain PyTorch; each part of a batch has the same weight, unless items are counted."""
    models = [build(draw, seed, compiles=False) for seed in ((0, 1) if draw.has("two models") else (0,))]
    for parameter in (item for model in models for item in model.parameters() if draw.has_masters):
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    optimizers = [optimizer_of(draw, model) for model in models]
    hooks = [PlainFeedback(model) for model in models] if draw.has("feedback hook") else []
    data, found = samples(draw), Found()
    if draw.has("local sgd"):
        return _plain_local_sgd(draw, models[0], data)
    half = draw.steps // 2
    for step in range(draw.steps):
        setup = draw.resumes_under if draw.resumes_under and step >= half else draw.setup
        windows = list(pieces_of(draw, setup, step, data))
        items = sum(items_in(piece) for parts in windows for piece in parts) if draw.has("num_items") else 1
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            change_trained(draw, model, optimizer, step)
            total = 0.0
            for number, parts in enumerate(windows):
                loss = _plain_losses(draw, model, parts, step * draw.window + number, len(windows), items)
                loss.backward()
                total += loss.item()
            if hooks:
                hooks[index].apply()
            found.norms += clip(draw, model, nn.utils)
            optimizer.step()
            optimizer.zero_grad()
            if not index:
                found.losses.append(total)
    for index, model in enumerate(models):
        found.weights.update({f"{index}.{name}": value.clone() for name, value in model.state_dict().items()})
    return found


def _plain_losses(draw: Draw, model: nn.Module, parts: list[Any], micro: int, count: int, items: Any) -> torch.Tensor:
    losses, buffers, first = [], _buffers(model), None
    for part in parts:
        _put_buffers(model, buffers)
        torch.manual_seed(micro)  # what ranks with equal generators do
        with torch.autocast("cpu", torch.bfloat16) if draw.precision == "bf16" else nullcontext():
            loss = loss_of(model, part)
        losses.append(loss * items_in(part) / items if draw.has("num_items") else loss / len(parts) / count)
        first = first or _buffers(model)
    _put_buffers(model, first)  # the first rank's are kept
    return torch.stack(losses).sum()


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def _put_buffers(model: nn.Module, values: Any) -> None:
    for name, value in model.named_buffers():
        value.data.copy_(values[name])


def _plain_local_sgd(draw: Draw, model: nn.Module, data: list[Any]) -> Found:
    copies = [copy.deepcopy(model) for _ in range(draw.setup.parts)]
    optimizers = [optimizer_of(draw, item) for item in copies]
    found = Found()
    for step in range(draw.steps):
        losses, norms = [], []
        for index, (item, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            for number, parts in enumerate(pieces_of(draw, draw.setup, step, data)):
                torch.manual_seed(step * draw.window + number)
                with torch.autocast("cpu", torch.bfloat16) if draw.precision == "bf16" else nullcontext():
                    loss = loss_of(item, parts[index]) / draw.window
                loss.backward()
                losses.append(loss.item() / len(copies))
            norms += clip(draw, item, nn.utils)
            optimizer.step()
            optimizer.zero_grad()
        found.losses.append(sum(losses))
        found.norms += norms[:1]
        if (step + 1) % 2 == 0 or step + 1 == draw.steps:
            with torch.no_grad():
                for same in zip(*(item.parameters() for item in copies), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    found.weights = {f"0.{name}": value.clone() for name, value in copies[0].state_dict().items()}
    return found


def accelerator_for(draw: Draw, setup: Setup) -> Accelerator:
    """The Accelerator of a draw on a setup's ranks."""
    given: dict[str, Any] = {"mixed_precision": draw.precision, "gradient_accumulation_steps": draw.window}
    if draw.has("dispatched") or draw.has("split batches"):
        given["dataloader_config"] = DataLoaderConfiguration(
            dispatch_batches=draw.has("dispatched"), split_batches=draw.has("split batches")
        )
    if draw.has("dynamo") or draw.has("dynamo blocks"):
        given["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=draw.has("dynamo blocks"))
    if draw.has("power sgd"):
        given["kwargs_handlers"] = [DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=POWER)]
    fsdp = {
        "auto_wrap_policy": "transformer_based_wrap" if setup.units else "no_wrap",
        "state_dict_type": setup.format,
        "activation_checkpointing": draw.has("fsdp checkpointing"),
    }
    if setup.units and draw.model in BLOCKS:
        fsdp["transformer_cls_names_to_wrap"] = [BLOCKS[draw.model]]
    if setup.sizes:
        sizes = {f"{axis}_size": size for axis, size in setup.sizes.items()}
        handler = PipelineParallelConfig(schedule=setup.schedule) if "pp" in setup.sizes else None
        given["parallelism_config"] = ParallelismConfig(**sizes, pp_handler=handler)
        splits = handler is not None and setup.schedule in SPLIT_BACKWARD
        if splits:  # where parameters are freed, it is refused
            fsdp["reshard_after_forward"] = False
        if "dp_shard" in setup.sizes or splits:
            given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **fsdp)
    elif setup.name in ("fsdp1", "fsdp2"):
        version = int(setup.name[-1])
        extra = {"use_orig_params": True} if version == 1 else {}
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=version, **fsdp, **extra)
    elif setup.name.startswith("zero"):
        settings: dict[str, Any] = {"gradient_clipping": 0.5} if draw.clip == "norm" else {}
        if setup.name == "zero3":  # of which the weights are compared
            settings["zero3_save_16bit_model"] = True
        given["deepspeed_plugin"] = DeepSpeedPlugin(
            zero_stage=int(setup.name[-1]), gradient_accumulation_steps=draw.window, **settings
        )
    return Accelerator(cpu=True, **given)


def train(draw: Draw, setup: Setup, first: int, last: int, folder: str | None) -> Found:
    """Steps ``first`` to ``last`` on this rank; the state is read from the folder, or written there."""
    accelerator = accelerator_for(draw, setup)
    seeds = (0, 1) if draw.has("two models") else (0,)
    models = [build(draw, seed + 10 * (first > 0)) for seed in seeds]
    optimizers = [optimizer_of(draw, model) for model in models]
    data = samples(draw)[first * draw.window * BATCH : last * draw.window * BATCH]
    size = BATCH if draw.has("split batches") else BATCH // setup.parts
    loader = DataLoader(data, batch_size=size, collate_fn=stack)  # type: ignore[arg-type]
    if setup.name.startswith("zero"):
        *prepared, loader = accelerator.prepare(*models, *optimizers, loader)
    else:
        prepared = list(accelerator.prepare(*models, *optimizers))
        loader = accelerator.prepare(loader) if not folder else _by_hand(accelerator, data, size)
    models, optimizers = prepared[: len(models)], prepared[len(models) :]
    for model in models if draw.has("feedback hook") else ():
        names = {item: name for name, item in accelerator.unwrap_model(model).named_parameters()}
        model.register_comm_hook({}, feedback_hook(names))
    if folder and first:
        accelerator.load_state(folder)
    if setup.sizes.get("sp"):
        loader = accelerator.strategy.split_loader(loader, models[0])
    named = None
    if draw.has(*TWO_LOADERS):
        second = DataLoader(samples(draw, second=True), batch_size=size, collate_fn=stack)  # type: ignore[arg-type]
        second = accelerator.prepare(second)
        if setup.sizes.get("sp"):
            second = accelerator.strategy.split_loader(second, models[0])
        named = loader if draw.has("second loader first") else None
        loader = _side_by_side(loader, second, named is not None)
    found = Found()
    with ExitStack() as blocks:
        local = LocalSGD(accelerator, models[0], 2) if draw.has("local sgd") else None
        if local is not None:
            blocks.enter_context(local)
        _loop(draw, accelerator, models, optimizers, loader, found, local, first, named)
    if folder and not first:
        accelerator.save_state(folder)
    for index, model in enumerate(models):
        state = accelerator.get_state_dict(model)
        found.weights.update({f"{index}.{name}": value.detach().clone() for name, value in (state or {}).items()})
    accelerator.free_memory()
    return found


def _side_by_side(loader: Any, second: Any, second_first: bool) -> Iterator[dict[str, Any]]:
    """The batches of a loader, each with one of the second loader, which is repeated."""

    def cycled() -> Iterator[dict[str, Any]]:
        while True:
            yield from second

    if second_first:
        yield from (merge(batch, other) for other, batch in zip(cycled(), loader, strict=False))
    else:
        yield from (merge(batch, other) for batch, other in zip(loader, cycled(), strict=False))


def _by_hand(accelerator: Accelerator, data: list[Any], size: int) -> list[Any]:
    """This rank's batches without a loader, whose position a state would restore."""
    ranks = accelerator.strategy.data_collectives
    return [
        stack(data[start + ranks.rank * size : start + (ranks.rank + 1) * size])
        for start in range(0, len(data), size * ranks.world_size)
    ]


def _loop(
    draw: Draw,
    accelerator: Accelerator,
    models: list[Any],
    optimizers: list[Any],
    loader: Any,
    found: Found,
    local: Any,
    first: int,
    named: Any,
) -> None:
    of_window: list[float] = []
    for number, batch in enumerate(loader):
        if number % draw.window == 0:
            for model, optimizer in zip(models, optimizers, strict=True):
                inner = accelerator.unwrap_model(model)
                change_trained(draw, inner, optimizer, first + number // draw.window)
        with accelerator.accumulate(*models, loader=named):
            for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                if draw.has("zero first", "zero both"):
                    optimizer.zero_grad()
                torch.manual_seed(number)
                loss = _step(draw, accelerator, model, optimizer, batch)
                if accelerator.sync_gradients:
                    found.norms += clip(draw, model, accelerator)
                optimizer.step()
                if not draw.has("zero first", "zero after forward"):
                    optimizer.zero_grad()
                if not index:
                    of_window.append(_shared_loss(draw, accelerator, batch, loss))
        if accelerator.sync_gradients:
            found.losses.append(_total(draw, of_window))
            of_window.clear()
            if local is not None:
                local.step()


def _step(
    draw: Draw, accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: dict[str, Any]
) -> torch.Tensor:
    more = {"num_items": items_in(batch)} if draw.has("num_items") else {}
    tensors = list(arguments_of(batch).values())
    with accelerator.maybe_context_parallel(
        buffers=tensors, buffer_seq_dims=[min(1, tensor.ndim - 1) for tensor in tensors]
    ):
        loss = loss_of(model, batch)
        if draw.has("zero after forward"):
            optimizer.zero_grad()
        accelerator.backward(loss, **more)
    return loss.detach()


def _shared_loss(draw: Draw, accelerator: Accelerator, batch: dict[str, Any], loss: torch.Tensor) -> Any:
    if not draw.has("num_items"):
        return accelerator.reduce(loss.float(), "mean").item()
    items = items_in(batch)
    return accelerator.reduce((loss.float() * items), "sum").item(), accelerator.reduce(items, "sum").item()


def _total(draw: Draw, of_window: list[Any]) -> float:
    if not draw.has("num_items"):
        return float(sum(of_window)) / draw.window
    return float(sum(loss for loss, _ in of_window) / sum(items for _, items in of_window))


def run_draws(jobs: list[tuple[Draw, Setup, int, int, str | None]]) -> list[Found]:
    """Train several draws on this rank, one after another, up to the first that ends in an error of its own."""
    results: list[Found] = []
    for job in jobs:
        with context.isolated():
            try:
                results.append(train(*job))
            except (CheckpointError, ConfigurationError) as error:
                results.append(Found(refused=str(error)))
            except Exception:
                results.append(Found(error=traceback.format_exc(limit=-6)))
        results[-1].weights = results[-1].weights if os.environ.get("RANK", "0") == "0" else {}
        if results[-1].error:
            break  # the ranks may have left each other, so the rest is run in a world of its own
    return results
