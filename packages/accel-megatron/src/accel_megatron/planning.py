"""What a rank holds, sends and reads, computed from the model's weights and the parallel sizes: for ``accel plan``.

Weights, gradients and optimizer states are exact, since they follow from the mapping of the weights. Activations are
what the modules of :mod:`accel_megatron.layers` save for the backward pass. Messages below a kilobyte (losses, norms,
numbers of tokens) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from accel_state.errors import ConfigurationError
from accel_state.options import MegatronOptions

from .architectures.base import Architecture, Decoder
from .architectures.registry import architecture_of
from .layout import Sizes, places, sizes_for
from .plugin import MegatronLMPlugin
from .weights import Weight, part_of, split_dim

_STATES = {"adam": 2, "adamw": 2, "sgd": 0, "sgd_momentum": 1}


def plan_rank(settings: Mapping[str, Any], model: Any, **numbers: Any) -> dict[str, Any]:
    """The plan of a rank; called by ``accel plan`` through the entry point group ``accel.planners``.

    Args:
        settings: the resolved options of ``accel launch``.
        model: the Transformers model, on the meta device.
        **numbers: as in :func:`plan_plugin`.
    """
    given = {item.name: settings[f"megatron_lm_{item.name}"] for item in fields(MegatronOptions)}
    return plan_plugin(
        MegatronLMPlugin(**given),
        model,
        mixed_precision=settings["mixed_precision"] or "no",
        steps=int(settings["gradient_accumulation_steps"] or 1),
        **numbers,
    )


def plan_plugin(
    plugin: MegatronLMPlugin,
    model: Any,
    *,
    processes: int,
    rank: int,
    batch_size: int,
    seq_length: int,
    optimizer: str = "adamw",
    split_batches: bool = False,
    mixed_precision: str = "no",
    steps: int = 1,
    device: str = "cuda",
) -> dict[str, Any]:
    """What a rank holds, sends and reads.

    Args:
        plugin: the settings.
        model: the Transformers model, on the meta device.
        processes: number of ranks.
        rank: the rank to plan.
        batch_size: samples of a micro batch, which is the batch of the loader.
        seq_length: tokens of a sample.
        optimizer: "adamw", "adam", "sgd" or "sgd_momentum".
        split_batches: the loader's batch is divided over the data-parallel ranks.
        mixed_precision: "no", "fp16" or "bf16".
        steps: calls of the model in an optimizer step.
        device: type of the devices, whose kernels save different tensors.
    """
    plugin.check_world(processes)
    architecture = architecture_of(model)
    kind = architecture.hf.model_type
    if not isinstance(architecture, Decoder) or architecture.settings().get("num_moe_experts"):
        raise ConfigurationError(
            f"accel plan computes Megatron-core's plan of causal models without experts, and this is a {kind}. `accel "
            "estimate-memory --strategy megatron` estimates the memory of any model."
        )
    work = _Work(plugin, architecture, model, processes, rank, batch_size, seq_length, mixed_precision, device)
    samples = batch_size * plugin.num_micro_batches
    if split_batches:
        samples //= work.dp
    first = work.dp_rank * samples
    coordinates = {name: position for name, position in work.coordinates.items() if position[1] > 1}
    return {
        "coordinates": coordinates or {"dp": (0, 1)},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "memory": work.memory(_STATES[optimizer]),
        "collectives": work.messages(steps),
        "data": (work.dp, work.dp_rank, samples * work.dp, tuple(range(first, first + samples))),
        "local_length": seq_length // plugin.context_parallel_size,
        "axes": {name: size for name, (_, size) in work.coordinates.items()},
    }


@dataclass
class _Work:
    plugin: MegatronLMPlugin
    architecture: Architecture
    model: Any
    processes: int
    rank: int
    batch_size: int
    seq_length: int
    precision: str | None
    device: str
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        plugin = self.plugin
        self.tp, self.cp, self.pp = plugin.tp_degree, plugin.context_parallel_size, plugin.pp_degree
        self.dp = self.processes // (self.tp * self.cp * self.pp)
        self.bytes = 2 if self.precision in ("fp16", "bf16") else 4
        self.coordinates: dict[str, tuple[int, int]] = {}
        rest = self.rank
        for name, size in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)):
            rest, position = divmod(rest, size)
            self.coordinates = {name: (position, size), **self.coordinates}
        self.stage, self.dp_rank = self.coordinates["pp"][0], self.coordinates["dp"][0]
        self.sizes = sizes_for(
            self.architecture,
            self.tp,
            self.pp,
            1,
            plugin.decoder_last_pipeline_num_layers,
            plugin.num_layers_per_virtual_pipeline_stage,
        )
        self.core = self.architecture.settings()
        self.sp = self.tp if plugin.sequence_parallelism else 1
        self.tokens = self.batch_size * self.seq_length // self.cp
        self.layers = sum(self.sizes.layers[chunk * self.pp + self.stage] for chunk in range(self.sizes.chunks))
        self.first, self.last = self.stage == 0, self.stage == self.pp - 1
        self._count()

    def _count(self) -> None:
        """Values of this rank's parameters, and those that are summed over other ranks than data-parallel ones."""
        state = self.model.state_dict()
        self.rows = -(-self.architecture.vocab_size // self.tp) * self.tp
        self.values = self.norms = self.embedding = 0
        for pair in self.architecture.weights():
            full = pair.transform.to_megatron([state[name] for name in pair.names])
            for target, tensor in zip(pair.targets, full, strict=True):
                for stage, _, _, _ in places(target, self.sizes, 1, self.architecture.tied):
                    if stage == self.stage:
                        self._add(target, tensor, pair)

    def _add(self, target: str, tensor: torch.Tensor, pair: Weight) -> None:
        count = part_of(tensor, pair, split_dim(target), self.tp, 0, self.rows).numel()
        self.values += count
        # Each rank has the gradients of its part of the sequence only.
        if self.sp > 1 and ("layernorm" in target or target.endswith(("linear_proj.bias", "linear_fc2.bias"))):
            self.norms += count
        if target == "embedding.word_embeddings.weight":
            self.embedding = count

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, copies: int) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer states, buffers and activations."""
        shards = self.dp * self.cp if self.plugin.use_distributed_optimizer else 1
        # Half-precision weights are rounded from float32 ones; gradients are accumulated in float32.
        state = self.values * 4 * (copies + (1 if self.bytes == 2 else 0)) // shards
        gathered = self.tokens * self.core["hidden_size"] * self.bytes if self.sp > 1 else 0
        return {
            "weights": self.values * self.bytes,
            "gradients": self.values * 4,
            "optimizer": state,
            "buffers": gathered,
            "activations": self.activations(),
        }

    def activations(self) -> int:
        """Bytes that are saved for the backward pass, when most micro batches are in flight."""
        count, chunks = self.plugin.num_micro_batches, self.sizes.chunks
        if chunks == 1:
            in_flight: float = min(count, self.pp - self.stage)
        else:  # chunks of layers rather than whole stages
            warm_up = (self.pp - self.stage - 1) * 2 + (chunks - 1) * self.pp + 1
            in_flight = min(warm_up, count * chunks) / chunks
        layer, unit = self._layer_bytes(), self.tokens * self.core["hidden_size"] // self.sp * self.bytes
        head = self._head_bytes() if self.last else 0
        layers = in_flight * self.layers * layer
        if self.plugin.recompute_granularity == "full":
            each = self.plugin.recompute_num_layers or 1
            if self.plugin.recompute_method == "block":
                layers = in_flight * (min(each, self.layers) * unit + max(self.layers - each, 0) * layer)
                head = max(head, 0 if each < self.layers else layer)
            else:  # the output layer is done when the first unit is repeated
                layers = in_flight * -(-self.layers // each) * unit
                head = max(head, each * layer)
        embedded = in_flight * self.tokens * 8 if self.first else 0
        return int(layers + embedded + head)

    def _norm(self, values: float) -> float:
        """Bytes that a norm of so many values of a token saves, beyond its input and its output."""
        if self.core.get("normalization") != "RMSNorm" or self.device != "cpu":
            return 8
        # On CPUs torch's RMSNorm consists of several operations in float32.
        return 4 + values * (4 + 4 - self.bytes)

    def _layer_bytes(self) -> float:
        core, architecture, width = self.core, self.architecture, self.bytes
        heads, hidden = core["num_attention_heads"], core["hidden_size"] / self.sp
        groups, size = core.get("num_query_groups") or heads, self._head_size()
        rope = architecture.position_embedding == "rope"  # type: ignore[attr-defined]
        attention = (heads + 2 * groups) * size + heads * size  # queries, keys and values in one tensor; the output
        if rope:
            attention += (heads + groups) * size
        each = 2 * hidden  # outputs of the norms
        norms = 2 - getattr(architecture.hf, "use_parallel_residual", False)  # which read different tensors
        each += norms * hidden + attention / self.tp
        # Gated: both parts in one tensor, the activation, the other part, the product.
        each += (5 if core.get("gated_linear_unit") else 2) * core["ffn_hidden_size"] / self.tp
        total = each * width + 2 * self._norm(hidden) + 4 * heads / self.tp  # statistics of the softmax
        if core.get("qk_layernorm"):
            total += heads * size / self.tp * width + self._norm((heads + groups) * size / self.tp)
        if core.get("hidden_dropout"):
            total += 2 * hidden
        angles = 4 * self.seq_length // self.cp * size * architecture.rotary_percent if rope else 0  # type: ignore[attr-defined]
        return self.tokens * total + angles * width

    def _head_size(self) -> int:
        return int(self.core.get("kv_channels") or self.core["hidden_size"] // self.core["num_attention_heads"])

    def _head_bytes(self) -> float:
        hidden = self.core["hidden_size"] / self.sp
        return self.tokens * (2 * hidden * self.bytes + self._norm(hidden) + self.rows / self.tp * 4)

    # -- messages ----------------------------------------------------------------------------------------------------

    def messages(self, calls: int) -> list[tuple[str, str, int, int, int]]:
        """Kind, axis, number of ranks, number of calls and bytes of the full tensors, in an optimizer step."""
        found: list[tuple[str, str, int, int, int]] = []

        def add(kind: str, axis: str, ranks: int, times: int, each: int) -> None:
            if times and ranks > 1 and each >= 1024:
                found.append((kind, axis, ranks, times, times * each))

        batches = calls * self.plugin.num_micro_batches
        layer = self.tokens * self.core["hidden_size"] * self.bytes
        self._tensor_parallel(add, batches, layer)
        if self.cp > 1:
            groups = self.core.get("num_query_groups") or self.core["num_attention_heads"]
            gathered = 2 * self.cp * self.tokens * groups * self._head_size() // self.tp * self.bytes
            add("all-gather", "cp", self.cp, batches * self._forwards(), gathered)
            add("all-reduce", "cp", self.cp, batches * self.layers, gathered)
        chunks = self.sizes.chunks
        passes = batches * chunks
        # The last stage of one chunk sends to the first stage of the next one.
        ahead = passes if not self.last else batches * (chunks - 1)
        back = passes if not self.first else batches * (chunks - 1)
        if self.pp > 1:
            add("send", "pp", 2, ahead + back, layer // self.sp)
        self._reductions(add)
        return found

    def _forwards(self) -> int:
        """Forward passes of layers in a micro batch, with those that are repeated."""
        if self.plugin.recompute_granularity != "full":
            return self.layers
        if self.plugin.recompute_method == "block":
            per = self.layers // self.sizes.chunks
            return self.layers + self.sizes.chunks * min(self.plugin.recompute_num_layers or 1, per)
        return 2 * self.layers

    def _tensor_parallel(self, add: Any, batches: int, layer: int) -> None:
        forwards, embeds = self._forwards(), self.first
        logits = self.tokens * 4
        if self.sp > 1:
            # The embedding is summed in parts, unless positions are added to it first.
            whole = self.architecture.position_embedding != "rope"  # type: ignore[attr-defined]
            gathers = 2 * forwards + 4 * self.layers + embeds + 2 * self.last
            scatters = 2 * forwards + 2 * self.layers + (embeds and not whole) + self.last
            add("all-gather", "tp", self.tp, batches * gathers, layer)
            add("reduce-scatter", "tp", self.tp, batches * scatters, layer)
            add("all-reduce", "tp", self.tp, batches * int(embeds and whole), layer)
        else:
            add("all-reduce", "tp", self.tp, batches * (2 * forwards + 2 * self.layers + embeds + self.last), layer)
        if self.last:
            add("all-reduce", "tp", self.tp, batches * 3, logits)

    def _reductions(self, add: Any) -> None:
        """Of the gradients, once in a step."""
        add("all-reduce", "tp", self.tp, 1, self.norms * 4)
        if self.architecture.tied and self.pp > 1 and (self.first or self.last):
            add("all-reduce", "pp", 2, 1, self.embedding * 4)
        ranks, axis = self.dp * self.cp, "+".join(name for name in ("dp", "cp") if getattr(self, name) > 1)
        if self.plugin.use_distributed_optimizer:
            add("reduce-scatter", axis, ranks, self.sizes.chunks, self.values * 4 // self.sizes.chunks)
            add("all-gather", axis, ranks, self.sizes.chunks, self.values * self.bytes // self.sizes.chunks)
        else:
            add("all-reduce", axis, ranks, self.sizes.chunks, self.values * 4 // self.sizes.chunks)
