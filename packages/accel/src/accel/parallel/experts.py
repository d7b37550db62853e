"""Expert parallelism: the stacked weights of a mixture's experts are sharded over the ep axis, and tokens travel.

The ranks of dp_shard, cp and tp are divided into "efsdp" and "ep" for experts. An expert's weights are DTensors on
both: ``Shard(0)`` over ep (whole experts), and another dimension over efsdp (by ``fully_shard``). Every rank routes its
own tokens, sends each to the rank of its experts and gets the outputs back; no token is dropped.

Gradients: a rank of ep sums those of all tokens that it received, so the mean over efsdp (and dp_replicate) that
``fully_shard`` takes has to be multiplied by tp_size / ep_size to be the mean over all ranks with tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

from .._torch_compat import shard_replicated
from .config import ParallelismConfig
from .expert_balance import BALANCERS, ExpertBalancer, LoadCounter, PipelineLoad, reduce_auxiliary_loss
from .expert_dispatch import dispatched, scaled_gradient
from .mesh import expert_mesh
from .tp_collectives import joined, part

COMPARED = frozenset(
    {
        "DeepseekV3Experts",
        "GptOssExperts",
        "Llama4TextExperts",
        "MixtralExperts",
        "OlmoeExperts",
        "Qwen2MoeExperts",
        "Qwen3MoeExperts",
    }
)
"""The classes of Transformers whose training with distributed experts the tests compare with one process."""


def experts_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that hold the stacked weights of experts, by name."""
    return {name: module for name, module in model.named_modules() if is_stack(module)}


def parameters_of_experts(model: nn.Module) -> list[str]:
    """Return the names of the modules of :func:`experts_in` and of their parameters."""
    return [
        name
        for prefix, module in experts_in(model).items()
        for name in (prefix, *(f"{prefix}.{key}" for key in module._parameters))
    ]


def is_stack(module: nn.Module) -> bool:
    """Return True if a module is one of :func:`experts_in`, below a checkpoint or not."""
    weight = module._parameters.get("down_proj")
    return isinstance(getattr(module, "num_experts", None), int) and weight is not None and weight.ndim == 3


class ExpertParallel:
    """The ep axis of a mesh.

    Attributes:
        size: the number of ranks that experts are distributed over.
        everyone: the ranks with tokens of the same layers.
        sharding: the ranks that each expert is sharded over, and their copies, for ``fully_shard``.
    """

    def __init__(
        self, mesh: DeviceMesh, settings: ParallelismConfig, averaging: Collectives, everyone: Collectives
    ) -> None:
        sparse = expert_mesh(mesh, settings.size("ep"))
        self.size: int = settings.size("ep")
        self._mesh = sparse["ep"]
        self._tp = mesh["tp"] if settings.tp_enabled else None
        replicates = "dp_replicate" in (sparse.mesh_dim_names or ())
        self.sharding: DeviceMesh = sparse["dp_replicate", "efsdp"] if replicates else sparse["efsdp"]
        self._factor = settings.size("tp") / self.size
        self._averaging = averaging
        self.everyone: Collectives = everyone
        self._models: Any = WeakIdKeyDictionary()
        self._watched: Any = WeakIdKeyDictionary()
        self._active: Any = WeakIdKeyDictionary()  # low-rank adapters in use, by module
        self._rate = settings.ep_handler.balance_rate if settings.ep_handler is not None else 0.0

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose experts cannot be distributed.

        Raises:
            ConfigurationError: there are none, of a class that was not compared with one process, or in a number that
                the ranks do not divide.
        """
        found = experts_in(model)
        if not found:
            raise ConfigurationError(
                f"ep_size={self.size} distributes the experts of a mixture, and {type(model).__name__} has no stacked "
                "expert weights. Set ep_size=1, or use a mixture of Transformers 5, such as Mixtral or Qwen3-MoE."
            )
        for name, module in found.items():
            kind = type(module).__name__
            if kind not in COMPARED:
                raise ConfigurationError(
                    f"ep_size={self.size} does not support {name}, a {kind}: its training has not been compared with "
                    f"one process. Supported: {', '.join(sorted(COMPARED))}. Set ep_size=1."
                )
            self._check_sizes(name, module)
            if self._tp is not None and _adapters_of(module, model):
                raise ConfigurationError(
                    f"ep_size={self.size} with tp_size={self._tp.size()} does not support the low-rank adapters of "
                    f"{name}: it has not been compared with one process. Set tp_size=1, or adapt other layers."
                )
        if self._rate and not any(True for _ in _biased_routers(model)):
            raise ConfigurationError(
                f"balance_rate={self._rate} changes the bias (e_score_correction_bias) with which routers choose "
                f"experts, and {type(model).__name__} has none. Leave it out, and use the auxiliary loss of the model "
                "(output_router_logits=True)."
            )

    def _check_sizes(self, name: str, module: nn.Module) -> None:
        experts: Any = module.num_experts
        if experts % self.size:
            allowed = [str(size) for size in range(1, experts + 1) if experts % size == 0]
            raise ConfigurationError(
                f"ep_size={self.size} does not divide the {experts} experts of {name}. Allowed: {', '.join(allowed)}."
            )
        for key, parameter in module._parameters.items():
            if parameter is not None and self._dimension(parameter.shape) is None:
                raise ConfigurationError(
                    f"{key} of {name} has the shape {tuple(parameter.shape)}, and each expert is sharded over "
                    f"{self.sharding.size(-1)} ranks, which divide no dimension of it but the first. Choose a larger "
                    "ep_size."
                )

    def _dimension(self, shape: torch.Size) -> int | None:
        """Return the dimension that fully_shard shards: not the first, which ep does, and evenly, as torch requires."""
        return next((dim for dim in range(1, len(shape)) if shape[dim] % self.sharding.size(-1) == 0), None)

    def placement(self, parameter: nn.Parameter) -> Shard | None:
        """``shard_placement_fn`` of fully_shard."""
        dim = self._dimension(parameter.shape)
        return None if dim is None else Shard(dim)

    def prepare(self, model: nn.Module) -> None:
        """Have the experts of a model compute with distributed weights, before :meth:`shard` distributes them."""
        loads = {}
        parents = dict(model.named_modules())
        for name, module in experts_in(model).items():
            counter = loads[name] = LoadCounter(int(module.num_experts))  # type: ignore[arg-type]
            if type(module).__name__ == "Llama4TextExperts":
                self._replace_block(parents[_parent_of(name)], module, counter)
            else:
                self._replace_experts(module, counter)
            module.num_experts = counter.experts // self.size  # type: ignore[assignment]
            for adapter in _adapters_of(module, model):
                # PEFT would add the changes of all experts to the weights of this rank's.
                adapter._activate_lora = partial(self._activated, module, adapter)
        routers = dict(_biased_routers(model)) if self._rate else {}
        self._models[model] = True
        device = torch.device(self._mesh.device_type)
        BALANCERS[model] = ExpertBalancer(loads, routers, self._rate, self.everyone, device)
        reduce_auxiliary_loss(model, self._averaging)

    def merge(self, model: nn.Module, parts: Iterable[nn.Module], stages: dist.ProcessGroup) -> None:
        """Count the tokens of a pipeline's stages together; ``parts`` are those of this rank."""
        BALANCERS[model] = PipelineLoad([BALANCERS[part] for part in parts], stages)

    def watch(self, optimizer: Optimizer) -> None:
        """Change the biases of routers after each step of an optimizer that updates them."""
        if self._rate and optimizer not in self._watched:
            self._watched[optimizer] = True
            optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for model in self._models:
            BALANCERS[model].after_step(optimizer)

    def shard(self, module: nn.Module) -> None:
        """Keep this rank's experts of a module of :func:`experts_in`; its weights are the same on all ranks."""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                own = shard_replicated(parameter.data, self._mesh, [Shard(0)])
                module._parameters[name] = nn.Parameter(own, parameter.requires_grad)

    def _replace_experts(self, module: nn.Module, counter: LoadCounter) -> None:
        """Experts that get tokens, the experts of each, and their weights."""
        inner: Callable[..., torch.Tensor] = module.forward

        def compute(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            with self._local_weights(module):
                if len(rows):
                    return inner(rows, numbers[:, None], rows.new_ones((len(rows), 1)))
                # All ranks must take part in the backward pass: a row that counts for nothing keeps the graph.
                return inner(rows.sum(0, keepdim=True), numbers.new_zeros((1, 1)), rows.new_ones((1, 1)))[:0]

        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tokens = hidden.shape[0]
            hidden, index, weights = self._own(hidden), self._own(index), self._own(weights)
            outputs, counts = dispatched(compute, hidden, index, counter.experts, self._mesh)
            if module.training:
                counter.add(counts, index.numel())
            return self._whole((outputs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype), tokens)

        module.forward = torch.compiler.disable(forward)

    def _replace_block(self, block: nn.Module, module: nn.Module, counter: LoadCounter) -> None:
        """Llama 4, whose block gives every expert all tokens, most of them multiplied by zero."""
        modules: Any = block

        def compute(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            order = torch.argsort(numbers, stable=True)
            sizes = torch.bincount(numbers, minlength=module.num_experts).tolist()  # type: ignore[arg-type]
            experts: Any = module
            with self._local_weights(module):
                gate, up = _grouped(rows[order], experts.gate_up_proj, sizes).chunk(2, dim=-1)
                out = _grouped(up * experts.act_fn(gate), experts.down_proj, sizes)
            return torch.empty_like(out).index_copy(0, order, out)

        def routed(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tokens = hidden.shape[0]
            hidden, index, weights = self._own(hidden), self._own(index), self._own(weights)
            inputs = (hidden.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
            outputs, counts = dispatched(compute, inputs, index.reshape(-1, 1), counter.experts, self._mesh)
            if module.training:
                counter.add(counts, index.numel())
            return self._whole(outputs.view(*index.shape, -1).sum(1), tokens)

        routed = torch.compiler.disable(routed)
        module.forward = routed  # inside fully_shard's hooks, which gather the weights

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = hidden.reshape(-1, modules.hidden_dim)
            scores, logits = modules.router(hidden)
            index = torch.topk(logits, modules.top_k, dim=1).indices
            out = modules.shared_expert(hidden)
            return out + modules.experts(hidden, index, scores.gather(1, index)), logits

        block.forward = forward

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of those that the ranks of tp have in common."""
        return x if self._tp is None else part(x, self._tp, dim=0)

    def _whole(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        return x if self._tp is None else joined(x, self._tp, tokens, dim=0)

    @contextmanager
    def _local_weights(self, module: nn.Module) -> Iterator[None]:
        """Make the weights of this rank's experts plain tensors."""
        held: Mapping[str, Any] = dict(module._parameters)
        for name, parameter in held.items():
            if isinstance(parameter, DTensor):
                local: Any = scaled_gradient(parameter.to_local(), self._factor)
                # Every rank has an adapter's factors of all experts, and their gradients of its own; FSDP's mean over
                # the ranks is right.
                own = slice(begin := self._mesh.get_local_rank() * len(local), begin + len(local))
                for adapter, names in self._active.get(module, ()):
                    for factors in names if adapter.parameter_name == name else ():
                        left, right, scale = adapter.get_delta_factors(factors)
                        local = torch.baddbmm(local, left[own], right[own], alpha=scale)
                module._parameters[name] = local
        try:
            yield
        finally:
            module._parameters.update(held)

    @contextmanager
    def _activated(self, module: nn.Module, adapter: Any, names: Iterable[str]) -> Iterator[None]:
        """Have the experts compute with an adapter of PEFT, in place of the parametrization that it would register."""
        active = self._active.setdefault(module, [])
        active.append((adapter, [name for name in names if name in adapter.lora_A]))
        try:
            yield
        finally:
            active.pop()


def _adapters_of(module: nn.Module, model: nn.Module) -> list[Any]:
    """PEFT's adapters of a module's parameters (``target_parameters``), outermost first."""
    wrappers: list[Any] = [item for item in model.modules() if type(item).__name__ == "ParamWrapper"]
    found = [item for item in wrappers if item.get_base_layer() is module]
    if any(not hasattr(item, name) for item in found for name in ("get_delta_factors", "_activate_lora")):
        raise ConfigurationError("adapters of distributed experts need a newer PEFT. Upgrade it: pip install -U peft.")
    return found


def _parent_of(name: str) -> str:
    """Return the name of the block of a module of experts, which adapters may wrap."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name.rpartition(".")[0]


def _grouped(rows: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Products of consecutive groups of rows with a matrix each; groups may be empty."""
    return torch.cat([part @ weight for part, weight in zip(rows.split(sizes), weights, strict=True)])


def _biased_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Routers with a bias that only decides which experts are chosen, by the name of their experts."""
    modules = dict(model.named_modules())
    for name in experts_in(model):
        for sibling in modules[_parent_of(name)].children():
            if isinstance(getattr(sibling, "e_score_correction_bias", None), torch.Tensor):
                yield name, sibling
