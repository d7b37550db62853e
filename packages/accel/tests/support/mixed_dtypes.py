"""Models with parameters of several dtypes on several ranks and in one process, for docs/reference/combinations.md."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.handlers import GradScalerKwargs
from accel.parallel.axis_settings import TorchTensorParallelConfig
from accel.parallel.config import ParallelismConfig
from accel_state import context
from accel_state.errors import ConfigurationError

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 3, 8, 8, 16, 16
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Relative; half precision rounds to 3 and 4 digits.
BOUNDS: Final = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 1e-2}
STRATEGIES: Final = {"FSDP 1": 2, "FSDP 2": 2, "HSDP": 4, "tp": 2}  # and the number of ranks
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
PLAN: Final = {
    **{f"*.{name}.{part}": "colwise" for name in COLUMNS for part in ("base", "up")},
    **{f"*.{name}.{part}": "rowwise" for name in ROWS for part in ("base", "down")},
}


@dataclass(frozen=True)
class Case:
    """A model in one precision.

    Attributes:
        dtype: of the base model.
        model: "plain", "LoRA" with adapters in fp32, or "bf16 LoRA" with adapters in bf16.
        frozen: whether a part of the base model is frozen (all of it with LoRA), or nothing is.
        precision: ``mixed_precision``.
    """

    dtype: str
    model: str
    frozen: bool
    precision: str

    @property
    def words(self) -> list[str]:
        """The row's description in the table."""
        part = "the last layers" if self.model == "plain" else "adapters"
        return [self.dtype, self.model, part if self.frozen else "all", self.precision]

    @property
    def computes_in(self) -> str:
        """The narrowest dtype that products are computed in."""
        dtypes = {self.dtype, "bf16" if self.model == "bf16 LoRA" else self.dtype}
        if self.precision != "no":
            return self.precision
        return "bf16" if "bf16" in dtypes else "fp32"


CASES: Final = [
    Case(dtype, model, frozen, precision)
    for dtype, model, frozen, precision in product(
        ("fp32", "bf16"), ("plain", "LoRA", "bf16 LoRA"), (False, True), ("no", "bf16", "fp16")
    )
]


class Adapted(nn.Module):
    """A layer with a low-rank adapter, which computes in its own dtype as PEFT's does."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=dtype)
        for factor in (self.down, self.up):
            nn.init.normal_(factor.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base(x)
        if not torch.is_autocast_enabled("cpu"):
            x = x.to(self.up.weight.dtype)
        return found + self.up(self.down(x)).to(found.dtype)


def build(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config).to(DTYPES[case.dtype])
    if case.frozen:
        first = [model.model.embed_tokens, model.model.layers[0], model.model.layers[1].mlp.up_proj]
        for module in first if case.model == "plain" else [model]:
            module.requires_grad_(False)
    if case.model == "plain":
        return model
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            dtype = DTYPES["bf16" if case.model == "bf16 LoRA" else "fp32"]
            setattr(model.model.layers.get_submodule(parent), leaf, Adapted(layer, dtype))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Nothing hides the gradients. Small steps would be lost in weights of 8 bits.
    return torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.5)


def samples(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator) + torch.arange(LENGTH)) % VOCABULARY


def plain(case: Case) -> dict[str, Any]:
    """Train in one process of plain PyTorch; with mixed precision, what is trained has master weights in fp32."""
    model = build(case)
    if case.precision != "no":
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=case.precision == "fp16")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses, norms = [], []
    for step in range(STEPS):
        with torch.autocast("cpu", DTYPES.get(case.precision), enabled=case.precision != "no"):
            loss = model(input_ids=samples(step), labels=samples(step)).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": model.state_dict(), "start": start}


def accelerator_for(case: Case, strategy: str) -> Accelerator:
    blocks: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    given: dict[str, Any] = {}
    if strategy in ("FSDP 1", "FSDP 2"):
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(strategy[-1]), **blocks)
    elif strategy == "HSDP":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **blocks)
        given["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    else:
        handler = None if case.model == "plain" else TorchTensorParallelConfig(plan=PLAN)
        given["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=handler)
    scaling = [GradScalerKwargs(init_scale=1024)] if case.precision == "fp16" else []
    return Accelerator(cpu=True, mixed_precision=case.precision, kwargs_handlers=scaling, **given)


def train(case: Case, strategy: str) -> dict[str, Any]:
    accelerator = accelerator_for(case, strategy)
    model: Any = build(case)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    ranks = accelerator.strategy.data_collectives
    losses, norms = [], []
    for step in range(STEPS):
        tokens = samples(step).chunk(ranks.world_size)[ranks.rank]
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "weights": weights}


def outcomes(cases: list[Case], strategy: str) -> list[dict[str, Any] | str]:
    """What each case computes, or the error that refuses it."""
    found: list[dict[str, Any] | str] = []
    for case in cases:
        with context.isolated():
            try:
                found.append(train(case, strategy))
            except ConfigurationError as error:
                found.append(str(error))
    return found


def deviation(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative deviation of the losses, the gradient norms, and the sum of all updates."""
    apart = [
        abs(one - other) / abs(other)
        for key in ("losses", "norms")
        for one, other in zip(found[key], expected[key], strict=True)
    ]
    assert found["weights"].keys() == expected["weights"].keys()
    error, update = 0.0, 0.0
    for name, value in expected["weights"].items():
        error += (found["weights"][name].float() - value.float()).square().sum().item()
        update += (value.float() - expected["start"][name].float()).square().sum().item()
    return max(*apart, (error / update) ** 0.5)
