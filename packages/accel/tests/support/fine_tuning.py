"""Fine-tuning on several ranks and in one process of plain PyTorch, for the table of docs/guides/fine-tuning.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel_state import context

STEPS, BATCH, LENGTH, VOCABULARY = 20, 8, 16, 64
BLOCKS = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}


@dataclass(frozen=True)
class Case:
    """A row: what is trained, and on what.

    Attributes:
        what: "lora", "qlora" or "muon".
        ranks: the number of them.
        where: sizes of a mesh; empty for DDP.
        storage: of packed weights in 4 bits; "NF4Tensor" for those of torchao.
        dtype: of everything else.
    """

    what: str
    ranks: int
    where: dict[str, int] = field(default_factory=dict)
    storage: str = ""
    dtype: str = "float32"


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def nf4_tensor(weight: torch.Tensor) -> Any:
    """A weight in 4 bits of torchao, with a scale for 64 elements and a second one for 16 of these."""
    try:
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor as module
    except ImportError:
        from torchao.dtypes import nf4tensor as module  # where older versions have it
    return module.to_nf4(weight, 64, 16)


def quantized(layer: nn.Linear, storage: str) -> nn.Module:
    if storage == "NF4Tensor":
        layer.weight = nn.Parameter(nf4_tensor(layer.weight.data), requires_grad=False)
        return layer
    from bitsandbytes.nn import Linear4bit

    packed = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=layer.weight.dtype,
        quant_type="nf4",
        quant_storage=getattr(torch, storage),
    )
    packed.load_state_dict({"weight": layer.weight.data})
    return packed.to("cpu")  # quantizes


def dequantized(layer: Any) -> nn.Linear:
    if isinstance(layer, nn.Linear) and hasattr(layer.weight, "get_original_weight"):
        layer.weight = nn.Parameter(layer.weight.get_original_weight(), requires_grad=False)
        return layer
    from bitsandbytes.functional import dequantize_4bit

    plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight.data = dequantize_4bit(layer.weight.data.clone(), layer.weight.quant_state).to(layer.compute_dtype)
    return plain


def model_of(case: Case, alone: bool) -> nn.Module:
    """The model; ``alone`` has the values of 4-bit weights in full."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config).to(getattr(torch, case.dtype))
    if case.what == "muon":
        return model
    model.requires_grad_(False)
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            base: Any = layer
            if case.what == "qlora":
                base = quantized(layer, case.storage)
                base = dequantized(base) if alone else base
            torch.manual_seed(len(name))  # the layers of bitsandbytes have drawn random numbers
            parent, _, child = name.rpartition(".")
            setattr(
                model.model.layers.get_submodule(parent), child, Adapted(base, layer.in_features, layer.out_features)
            )
    return model


def optimizers_of(case: Case, model: Any) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With a small eps, Adam makes steps of what is only rounding in gradients near zero.
    if case.what != "muon":
        return [torch.optim.AdamW(trained, lr=1e-2, eps=1e-2)]
    hidden = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, eps=1e-2)]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator).split(BATCH)


def plain(case: Case) -> dict[str, Any]:
    model = model_of(case, True)
    optimizers = optimizers_of(case, model)
    losses = []
    for tokens in batches():
        model.eval()
        with torch.no_grad():
            losses.append(loss_of(model, tokens).item())
        model.train()
        loss = loss_of(model, tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    trained = {name: item.detach() for name, item in model.named_parameters() if item.requires_grad}
    return {"losses": losses, "weights": trained}


def accelerator_of(case: Case) -> Accelerator:
    if not case.where:
        return Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(**BLOCKS) if "dp_shard_size" in case.where else None
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**case.where), fsdp_plugin=plugin)


def run(case: Case) -> dict[str, Any]:
    """The run of :func:`plain` on this rank: losses of evaluation and training, trained weights, and bytes held."""
    accelerator = accelerator_of(case)
    model: Any = model_of(case, False)
    model, *optimizers = accelerator.prepare(model, *optimizers_of(case, model))
    ranks = accelerator.strategy.data_collectives
    losses = []
    for tokens in batches():
        own = tokens.chunk(ranks.world_size)[ranks.rank]
        model.eval()
        with torch.no_grad():
            losses.append(accelerator.reduce(loss_of(model, own), "mean").item())
        model.train()
        loss = loss_of(model, own)
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    held = [getattr(item, "_local_tensor", item) for item in model.parameters()]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    kept = [getattr(value, "_local_tensor", value) for value in states]
    inner = accelerator.unwrap_model(model)
    whole = {
        name: item.full_tensor() if hasattr(item, "full_tensor") else item
        for name, item in inner.named_parameters()
        if item.requires_grad
    }
    return {
        "losses": losses,
        "weights": {name: value.detach().clone() for name, value in whole.items()},
        "weight bytes": sum(item.nbytes for item in held),
        "base bytes": sum(
            getattr(item, "_local_tensor", item).nbytes for name, item in inner.named_parameters() if "base" in name
        ),
        "state bytes": sum(value.nbytes for value in kept),
    }


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with context.isolated():
            found.append(run(case))
    return found


def deviation(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative deviation of the losses and of the norms of trained weights."""
    apart = [abs(one - other) / abs(other) for one, other in zip(found["losses"], expected["losses"], strict=True)]
    for name, value in expected["weights"].items():
        apart.append(((found["weights"][name] - value).norm() / value.norm()).item())
    return max(apart)
