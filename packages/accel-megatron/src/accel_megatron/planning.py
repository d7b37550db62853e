"""What a rank holds, sends and reads, computed from the model's weights and the parallel sizes: for ``accel plan``.

Weights, gradients and optimizer states are exact, since they follow from the mapping of the weights. Activations are
what the modules of :mod:`accel_megatron.layers` save for the backward pass. Messages below a kilobyte (losses, norms,
numbers of tokens) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from accel_state.errors import ConfigurationError
from accel_state.options import MegatronOptions

from .architectures.base import Architecture, Decoder
from .architectures.registry import architecture_of
from .layout import LAYER, Sizes, places, sizes_for
from .plugin import MegatronLMPlugin
from .weights import Weight, part_of, split_dim

# Parameters whose gradients are those of a rank's part of the sequence, with sequence parallelism.
_OF_SEQUENCES = re.compile(r"layernorm|layer_norm|lm_head\.dense|router\.weight|(linear_proj|linear_fc2)\.bias$")
# Bytes of a token that routing saves, for each expert, and for each expert that it is sent to.
_ROUTING, _ORDERS = 12, 24
_STATES = {"adam": 2, "adamw": 2, "sgd": 0, "sgd_momentum": 1}


def plan_rank(settings: Mapping[str, Any], model: Any, **numbers: Any) -> dict[str, Any]:
    """Return the plan of a rank; called by ``accel plan`` through the entry point group ``accel.planners``.

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
    """Return what a rank holds, sends and reads.

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
    if plugin.use_custom_fsdp:
        raise ConfigurationError(
            "accel plan does not count what Megatron-core's FSDP (use_custom_fsdp=True) holds and gathers. Plan with "
            "use_distributed_optimizer=True, whose ranks hold all parameters and gradients."
        )
    architecture = architecture_of(model)
    kind = architecture.hf.model_type
    works: dict[str, type[_Work]] = {"megatron-bert": _Bert, "t5": _T5}
    if kind not in works and not isinstance(architecture, Decoder):
        raise ConfigurationError(
            f"accel plan knows what causal models, {' and '.join(works)} hold and send in Megatron-core, and this is a "
            f"{kind}. `accel estimate-memory --strategy megatron` estimates the memory of any model."
        )
    experts = bool(architecture.settings().get("num_moe_experts"))
    work = works.get(kind, _Experts if experts else _Work)(
        plugin, architecture, model, processes, rank, batch_size, seq_length, mixed_precision, device
    )
    samples = batch_size * plugin.num_micro_batches
    if split_batches:
        samples //= work.dp
    first = work.data_rank * samples
    coordinates = {name: position for name, position in work.coordinates.items() if position[1] > 1}
    return {
        "coordinates": coordinates or {"dp": (0, 1)},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "memory": work.memory(_STATES[optimizer]),
        "collectives": work.messages(steps),
        "data": (work.dp, work.data_rank, samples * work.dp, tuple(range(first, first + samples))),
        "local_length": seq_length // plugin.context_parallel_size,
        "axes": {name: size for name, (_, size) in work.coordinates.items()},
    }


@dataclass
class _Work:
    """Of a causal model without experts."""

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
        self.core = self.architecture.settings()
        self.experts = int(self.core.get("num_moe_experts") or 1)
        self.ep = plugin.expert_model_parallel_size
        self.coordinates: dict[str, tuple[int, int]] = {}
        rest = self.rank
        for name, size in self._axes():
            rest, position = divmod(rest, size)
            self.coordinates = {name: (position, size), **self.coordinates}
        self.stage = self.coordinates["pp"][0]
        # Among the ranks of this stage that have the same parts of matrices.
        position = self.rank // self.tp % (self.dp * self.cp)
        self.ep_rank, self.data_rank = position % self.ep, position // self.cp
        self.first, self.last = self.stage == 0, self.stage == self.pp - 1
        self.sp = self.tp if plugin.sequence_parallelism else 1
        self.tokens = self.batch_size * self.seq_length // self.cp
        self._split_layers()
        self._count()

    def _axes(self) -> list[tuple[str, int]]:
        """Return the kinds of parallelism, from that of neighbouring ranks."""
        return [("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)]

    def _split_layers(self) -> None:
        plugin = self.plugin
        last, per_chunk = plugin.decoder_last_pipeline_num_layers, plugin.num_layers_per_virtual_pipeline_stage
        self.sizes = sizes_for(self.architecture, self.tp, self.pp, self.ep, last, per_chunk)
        self.layers = sum(self.sizes.layers[chunk * self.pp + self.stage] for chunk in range(self.sizes.chunks))

    def _count(self) -> None:
        """Values of this rank's parameters, and those that are summed over other ranks than data-parallel ones."""
        state = self.model.state_dict()
        self.rows = -(-self.architecture.vocab_size // self.tp) * self.tp
        # Trained, of experts on a part of the ranks, fixed, with the gradients of parts of sequences, of the embedding.
        self.values = self.expert_values = self.fixed = self.norms = self.embedding = 0
        for pair in self.architecture.weights():
            full = pair.transform.to_megatron([state[name] for name in pair.names])
            for target, tensor in zip(pair.targets, full, strict=True):
                for _ in range(self._copies(target)):
                    self._add(target, tensor, pair)
        self.fixed = len(self.architecture.unmapped) * self.rows // self.tp if self.last else 0

    def _copies(self, target: str) -> int:
        """Return how many times this rank has a parameter."""
        found = places(target, self.sizes, self.experts, self.architecture.tied)
        return sum(place[0] == self.stage and place[2] in (None, self.ep_rank) for place in found)

    def _add(self, target: str, tensor: torch.Tensor, pair: Weight) -> None:
        count = part_of(tensor, pair, split_dim(target), self.tp, 0, self.rows).numel()
        if self.ep > 1 and ".local_experts." in target:
            self.expert_values += count
        else:
            self.values += count
        # Each rank has the gradients of its part of the sequence only.
        if self.sp > 1 and _OF_SEQUENCES.search(target):
            self.norms += count
        if target == "embedding.word_embeddings.weight":
            self.embedding = count

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, copies: int) -> dict[str, int]:
        """Return bytes of weights, gradients, optimizer states, buffers and activations."""
        shards = self.dp * self.cp if self.plugin.use_distributed_optimizer else 1
        # Half-precision weights are rounded from float32 ones; gradients are accumulated in float32.
        each = 4 * (copies + (1 if self.bytes == 2 else 0))
        state = each * self.values // shards + each * self.expert_values // max(shards // self.ep, 1)
        gathered = self.tokens * self.core["hidden_size"] * self.bytes if self.sp > 1 else 0
        trained = self.values + self.expert_values
        return {
            "weights": (trained + self.fixed) * self.bytes,
            "gradients": trained * 4,
            "optimizer": state,
            "buffers": gathered,
            "activations": self.activations(),
        }

    def activations(self) -> int:
        """Return bytes that are saved for the backward pass, when most micro batches are in flight."""
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
        return int(layers + in_flight * self._input_bytes() + head)

    def _input_bytes(self) -> float:
        """Return bytes of the ids of tokens."""
        return self.tokens * 8 if self.first else 0

    def _norm(self, values: float) -> float:
        """Return bytes that a norm of so many values of a token saves, beyond its input and its output."""
        if self.core.get("normalization") != "RMSNorm" or self.device != "cpu":
            return 8
        # On CPUs torch's RMSNorm consists of several operations in float32.
        return 4 + values * (4 + 4 - self.bytes)

    def _layer_bytes(self) -> float:
        core, architecture, width = self.core, self.architecture, self.bytes
        heads, hidden = core["num_attention_heads"], core["hidden_size"] / self.sp
        groups, size = core.get("num_query_groups") or heads, self._head_size()
        rope = self._rotary()
        attention = (heads + 2 * groups) * size + heads * size  # queries, keys and values in one tensor; the output
        if rope:
            attention += (heads + groups) * size
        each = 2 * hidden  # outputs of the norms
        norms = 2 - getattr(architecture.hf, "use_parallel_residual", False)  # which read different tensors
        each += norms * hidden + attention / self.tp
        each += self._mlp_values()
        total = each * width + 2 * self._norm(hidden) + 4 * heads / self.tp  # statistics of the softmax
        if core.get("qk_layernorm"):
            total += heads * size / self.tp * width + self._norm((heads + groups) * size / self.tp)
        if core.get("hidden_dropout"):
            total += 2 * hidden
        angles = 4 * self.seq_length // self.cp * size * architecture.rotary_percent if rope else 0  # type: ignore[attr-defined]
        return self.tokens * total + angles * width

    def _mlp_values(self) -> float:
        """Values of a token that an MLP saves, without its input."""
        # Gated: both parts in one tensor, the activation, the other part, the product.
        return (5 if self.core.get("gated_linear_unit") else 2) * self.core["ffn_hidden_size"] / self.tp

    def _rotary(self) -> bool:
        return getattr(self.architecture, "position_embedding", None) == "rope"

    def _head_size(self) -> int:
        return int(self.core.get("kv_channels") or self.core["hidden_size"] // self.core["num_attention_heads"])

    def _head_bytes(self) -> float:
        hidden = self.core["hidden_size"] / self.sp
        return self.tokens * (2 * hidden * self.bytes + self._norm(hidden) + self.rows / self.tp * 4)

    # -- messages ----------------------------------------------------------------------------------------------------

    def messages(self, calls: int) -> list[tuple[str, str, int, int, int]]:
        """Kind, axis, number of ranks, number of calls and bytes of the full tensors, in an optimizer step."""
        self.sent: list[tuple[str, str, int, int, int]] = []
        batches = calls * self.plugin.num_micro_batches
        layer = self.tokens * self.core["hidden_size"] * self.bytes
        self._tensor_parallel(batches, layer)
        if self.cp > 1:
            groups = self.core.get("num_query_groups") or self.core["num_attention_heads"]
            gathered = 2 * self.cp * self.tokens * groups * self._head_size() // self.tp * self.bytes
            self._send("all-gather", self._cp_axis, self.cp, batches * self._forwards(), gathered)
            self._send("all-reduce", self._cp_axis, self.cp, batches * self.layers, gathered)
        chunks = self.sizes.chunks
        passes = batches * chunks
        # The last stage of one chunk sends to the first stage of the next one.
        ahead = passes if not self.last else batches * (chunks - 1)
        back = passes if not self.first else batches * (chunks - 1)
        if self.pp > 1:
            self._send("send", "pp", 2, ahead + back, self.sequences * layer // self.sp)
        self._reductions()
        return self.sent

    def _send(self, kind: str, axis: str, ranks: int, times: int, each: int) -> None:
        if times and ranks > 1 and each >= 1024:
            self.sent.append((kind, axis, ranks, times, times * each))

    @property
    def _cp_axis(self) -> str:
        return "cp"

    @property
    def _ep_axes(self) -> tuple[str, ...]:
        return ("ep",)

    sequences: ClassVar[int] = 1
    """Sequences that are passed from stage to stage together."""

    def _forwards(self) -> int:
        """Forward passes of layers in a micro batch, with those that are repeated."""
        if self.plugin.recompute_granularity != "full":
            return self.layers
        if self.plugin.recompute_method == "block":
            per = self.layers // self.sizes.chunks
            return self.layers + self.sizes.chunks * min(self.plugin.recompute_num_layers or 1, per)
        return 2 * self.layers

    def _tensor_parallel(self, batches: int, layer: int) -> None:
        again, columns, outputs = self._parts()
        repeated = self._forwards() / max(self.layers, 1)  # forward passes of a layer
        embeds = self._embeddings()
        if self.sp > 1:
            # The embedding is summed in parts, unless something is added to it first.
            whole = self._adds_to_embedding()
            gathers = repeated * columns + again + outputs + embeds + 2 * self.last
            scatters = repeated * outputs + columns + (0 if whole else embeds) + self.last
            self._send("all-gather", "tp", self.tp, int(batches * gathers), layer)
            self._send("reduce-scatter", "tp", self.tp, int(batches * scatters), layer)
            self._send("all-reduce", "tp", self.tp, batches * (embeds if whole else 0), layer)
        else:
            count = repeated * outputs + columns + embeds + self.last
            self._send("all-reduce", "tp", self.tp, int(batches * count), layer)
        if self.last:
            self._send("all-reduce", "tp", self.tp, batches * 3, self.tokens * 4)

    def _parts(self) -> tuple[int, int, int]:
        """Matrices of this rank's layers: whose input is gathered again, split by output, and split by input."""
        return 2 * self.layers, 2 * self.layers, 2 * self.layers

    def _embeddings(self) -> int:
        return int(self.first)

    def _adds_to_embedding(self) -> bool:
        return not self._rotary()

    def _reductions(self) -> None:
        """Of the gradients, once in a step."""
        self._send("all-reduce", "tp", self.tp, 1, self.norms * 4)
        if self.architecture.tied and self.pp > 1 and (self.first or self.last):
            self._send("all-reduce", "pp", 2, 1, self.embedding * 4)
        self._over_data(self.values, self.dp * self.cp, ("dp", "cp", "ep"))
        others = [name for name in ("dp", "cp") if name not in self._ep_axes]
        self._over_data(self.expert_values, self.dp * self.cp // self.ep, others)

    def _joined(self, axes: Sequence[str]) -> str:
        """Return the name of axes that are flattened into one."""
        return "+".join(name for name in self.coordinates if name in axes and self.coordinates[name][1] > 1)

    def _over_data(self, values: int, ranks: int, axes: Sequence[str]) -> None:
        axis = self._joined(axes)
        chunks = self.sizes.chunks
        if self.plugin.use_distributed_optimizer:
            self._send("reduce-scatter", axis, ranks, chunks, values * 4 // chunks)
            # The optimizers of dense and of expert parameters both gather all parameters.
            optimizers = 2 if self.ep > 1 else 1
            self._send("all-gather", axis, ranks, optimizers * chunks, values * self.bytes // chunks)
        else:
            self._send("all-reduce", axis, ranks, chunks, values * 4 // chunks)


@dataclass
class _Experts(_Work):
    """Of a causal model with a mixture of experts in every layer. Tokens are taken to be spread evenly over them."""

    def __post_init__(self) -> None:
        plugin = self.plugin
        if plugin.expert_tensor_parallel_size not in (None, plugin.tp_degree):
            raise ConfigurationError(
                f"expert_tensor_parallel_size={plugin.expert_tensor_parallel_size}, and accel plan knows experts that "
                f"are split like other layers (tp_degree={plugin.tp_degree}). Leave it out."
            )
        sizes = plugin.expert_model_parallel_size, plugin.context_parallel_size
        if max(sizes) % min(sizes):
            raise ConfigurationError(
                f"accel plan knows expert_model_parallel_size={sizes[0]} and context_parallel_size={sizes[1]} of which "
                "one divides the other. Change one of them."
            )
        super().__post_init__()

    def _axes(self) -> list[tuple[str, int]]:
        if self.ep == 1:
            return super()._axes()
        # Experts and sequences are both spread over the ranks next to each other.
        both = max(self.ep, self.cp)
        inner = [("cp", self.cp), ("ep", both // self.cp)]
        if self.cp > self.ep:
            inner = [("ep", self.ep), ("cp", both // self.ep)]
        return [("tp", self.tp), *inner, ("dp", self.dp * self.cp // both), ("pp", self.pp)]

    @property
    def _cp_axis(self) -> str:
        return self._joined(("cp", "ep") if 1 < self.ep < self.cp else ("cp",))

    @property
    def _ep_axes(self) -> tuple[str, ...]:
        return ("ep", "cp") if self.ep >= self.cp else ("ep",)

    @property
    def _chosen(self) -> int:
        return int(self.core["moe_router_topk"])

    def _mlp_values(self) -> float:
        # The tokens in the order of the experts, what an expert saves, and its product with the token's weight.
        each = super()._mlp_values() + self.core["ffn_hidden_size"] / self.tp
        return float(self._chosen * (self.core["hidden_size"] + each))

    def _layer_bytes(self) -> float:
        # Probabilities of the experts and orders of the tokens.
        return super()._layer_bytes() + self.tokens / self.sp * (_ROUTING * self.experts + _ORDERS * self._chosen)

    def _parts(self) -> tuple[int, int, int]:
        return self.layers, self.layers, self.layers  # attention

    def _tensor_parallel(self, batches: int, layer: int) -> None:
        super()._tensor_parallel(batches, layer)
        passes = batches * (self._forwards() + self.layers)
        weights = self.tokens * self._chosen * 4  # of the tokens
        if self.ep > 1:
            axis = self._joined(self._ep_axes)
            self._send("all-to-all", axis, self.ep, 2 * passes, layer // self.sp * self._chosen)
            self._send("all-to-all", axis, self.ep, passes, weights // self.sp)
        if self.sp > 1:
            self._send("all-gather", "tp", self.tp, passes, layer * self._chosen)
            self._send("all-gather", "tp", self.tp, batches * self._forwards(), weights)
            self._send("reduce-scatter", "tp", self.tp, passes, layer * self._chosen)
            self._send("reduce-scatter", "tp", self.tp, batches * self.layers, weights)


@dataclass
class _Bert(_Work):
    """Of a Megatron-BERT."""

    def _input_bytes(self) -> float:
        return 3 * super()._input_bytes()  # positions and types of tokens too

    def _layer_bytes(self) -> float:
        return super()._layer_bytes() + self.tokens * self.seq_length * self.bytes  # the mask

    def _head_bytes(self) -> float:
        hidden = self.core["hidden_size"] / self.sp
        return super()._head_bytes() + self.tokens * (3 * hidden * self.bytes + self._norm(hidden))

    def _tensor_parallel(self, batches: int, layer: int) -> None:
        super()._tensor_parallel(batches, layer)
        if self.sp > 1 and self.last:
            self._send("all-gather", "tp", self.tp, batches, layer)  # for the first token, of the next sentence


@dataclass
class _T5(_Work):
    """Of a T5, whose encoder and decoder have the same number of tokens."""

    sequences: ClassVar[int] = 2

    def _split_layers(self) -> None:
        hf, stages = self.architecture.hf, self.pp
        self.sizes = sizes_for(self.architecture, self.tp, 1, 1)
        self.split = self.plugin.pipeline_model_parallel_split_rank or max(stages // 2, 1)
        parts = (1, 1) if stages == 1 else (self.split, stages - self.split)
        if min(parts) < 1 or any(hf.num_layers % part for part in parts):
            raise ConfigurationError(
                f"{hf.num_layers} layers of T5's encoder cannot be split over {parts[0]} stages, and those of its "
                f"decoder over {parts[1]}, evenly. Choose pp_degree and pipeline_model_parallel_split_rank that divide "
                "the layers."
            )
        self.encoder, self.decoder = (hf.num_layers // part for part in parts)
        if stages > 1:
            self.encoder *= self.stage < self.split
            self.decoder *= self.stage >= self.split
        self.layers = self.encoder + self.decoder

    def _copies(self, target: str) -> int:
        if self.pp == 1 or "relative_pos_emb" in target:
            return 1
        layer = LAYER.match(target)
        if layer is not None:
            parts = self.split if layer[1].startswith("encoder") else self.pp - self.split
            first = 0 if layer[1].startswith("encoder") else self.split
            return int(self.stage == first + int(layer[2]) // (self.core["num_layers"] // parts))
        if target.startswith("embedding."):
            return int(self.first) + int(self.last and self.architecture.tied)
        return int(self.stage == self.split - 1 if target.startswith("encoder.") else self.last)

    def _input_bytes(self) -> float:
        """Return bytes of the ids, the distances of tokens, and the last norm of the encoder."""
        hidden = self.core["hidden_size"] / self.sp
        norm = self.tokens * (2 * hidden * self.bytes + self._norm(hidden))
        buckets = 8 * self.seq_length**2 * (int(self.encoder > 0) + int(self.decoder > 0))
        return 2 * super()._input_bytes() + buckets + (norm if self.pp == 1 or self.stage == self.split - 1 else 0)

    def _layer_bytes(self) -> float:
        """Return the mean of the layers of encoder and decoder."""
        core, width, hidden = self.core, self.bytes, self.core["hidden_size"] / self.sp
        heads = core["num_attention_heads"] / self.tp
        attention = 4 * heads * self._head_size()
        # Positions are added to the scores, which are saved, on CPUs twice. The outputs of relu are the next inputs.
        each = 4 * hidden + attention + (2 if self.device == "cpu" else 1) * heads * self.seq_length
        each += self._mlp_values() if core["gated_linear_unit"] else core["ffn_hidden_size"] / self.tp
        cross = 2 * hidden + attention
        encoder = self.tokens * (each * width + 2 * self._norm(hidden))
        decoder = encoder + self.tokens * (cross * width + self._norm(hidden) + 4 * heads)
        return (self.encoder * encoder + self.decoder * decoder) / max(self.layers, 1)

    def _parts(self) -> tuple[int, int, int]:
        split = 2 * self.encoder + 4 * self.decoder
        return split, split, 2 * self.encoder + 3 * self.decoder

    def _embeddings(self) -> int:
        return 2 * int(self.first)

    def _adds_to_embedding(self) -> bool:
        return False

    def _tensor_parallel(self, batches: int, layer: int) -> None:
        super()._tensor_parallel(batches, layer)
        positions = self.seq_length**2 * self.core["num_attention_heads"] * self.bytes
        self._send("all-gather", "tp", self.tp, batches * (int(self.encoder > 0) + int(self.decoder > 0)), positions)

    def _reductions(self) -> None:
        super()._reductions()
        positions = 2 * self.architecture.hf.relative_attention_num_buckets * self.core["num_attention_heads"]
        self._send("all-reduce", "pp", self.pp, 1, positions * 4)
