"""The memory of training on each process. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import ConfigurationError

# Bytes of optimizer state for each byte of updated weights.
OPTIMIZER_COPIES = {"adam": 2, "adamw": 2, "sgd": 0, "sgd_momentum": 1}
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""The strategies that are shown by default."""


@dataclass(frozen=True)
class Division:
    """What a strategy shards over the data-parallel processes."""

    weights: bool = False  # the weights, between steps
    gradients: bool = False  # the gradients, when a step is taken
    optimizer: bool = False  # the optimizer state
    # what is gathered to compute: "nothing", "layers" (one after the other) or "model" (all, until the end of
    # the backward); or "gradients", which DDP holds a second time
    gathers: str = "nothing"


_FULL_SHARD = Division(weights=True, gradients=True, optimizer=True, gathers="layers")
_SHARD_GRAD_OP = Division(weights=True, gradients=True, optimizer=True, gathers="model")

DIVISIONS = {
    "ddp": Division(gathers="gradients"),
    "fsdp": _FULL_SHARD,
    "zero1": Division(optimizer=True),
    "zero2": Division(gradients=True, optimizer=True),
    "zero3": _FULL_SHARD,
    "zero0": Division(),
    "shard_grad_op": _SHARD_GRAD_OP,
    "no_shard": Division(),
    "hybrid_shard": _FULL_SHARD,
    "hybrid_shard_zero2": _SHARD_GRAD_OP,
    "fsdp2": _FULL_SHARD,
    "fsdp2_no_reshard": _SHARD_GRAD_OP,
    "megatron": Division(optimizer=True),
}
"""All strategies: FSDP's (``fsdp`` is FULL_SHARD), those of FSDP 2, DeepSpeed's stages, and Megatron-core with its
distributed optimizer.
"""

# Of the 34 bytes of activations for each of a layer's s*b*h values, tensor parallelism shards 24 and replicates 10:
# Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, eq. 2 and 4.
_SHARDED_ACTIVATIONS = 24 / 34


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each process during training, at the end of a backward pass.

    Attributes:
        strategy: one of :data:`DIVISIONS`.
        weights: the process's shard of the weights.
        gradients: the gradients it keeps until the step.
        optimizer: the optimizer state, and the float32 master weights of a half-precision model.
        buffers: for communication: DDP's copies of the gradients, or the gathered layers of sharded training.
        activations: what the forward saves for the backward.
    """

    strategy: str
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations


def estimate_training(
    parameters: int,
    strategy: str = "ddp",
    *,
    num_processes: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    replicas: int = 1,
    whole: int = 0,
    weight_bytes: float = 4.0,
    master_weights: bool = False,
    optimizer: str = "adamw",
    largest_layer: int = 0,
    activations: int = 0,
) -> TrainingMemory:
    """Return bytes per process to train all parameters of a model.

    With N values of b bytes, k copies in the optimizer, and d = num_processes / (tensor_parallel * replicas) processes
    for each copy of the model: weights N*b, gradients N*b, optimizer N*b*k; or, with float32 master weights of a
    half-precision model, N*4*(1 + k). ZeRO 1 divides the optimizer by d, ZeRO 2 the gradients too, ZeRO 3 and FSDP the
    weights too (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5). Tensor parallelism divides all of them first,
    except ``whole`` values. ZeRO 3 and FSDP gather a layer to compute with it, and prefetch the next one: twice the
    largest layer, and its gradients before they are reduced; SHARD_GRAD_OP keeps the whole model gathered until the end
    of the backward. DDP on several processes holds the gradients a second time, in buckets. Tensor parallelism divides
    the activations inside attention and feed-forward (arXiv:2205.05198). Megatron-core also splits the embeddings, and
    a pipeline's stages have equal parts on average; it keeps float32 gradients, and float32 weights next to
    half-precision ones.

    Args:
        parameters: number of trained values.
        strategy: one of ``DIVISIONS``.
        num_processes: the world size.
        tensor_parallel: processes that share each layer.
        pipeline_parallel: stages of a pipeline; with ``megatron`` only.
        replicas: copies of the model that are sharded separately, as with hybrid strategies or a dp_replicate axis.
        whole: values that tensor parallelism replicates (norms, and embeddings that no plan shards).
        weight_bytes: bytes of a value of weights and gradients: 4, also for autocast; 2 for a half-precision model.
        master_weights: the optimizer keeps float32 weights and moments for half-precision weights, as in DeepSpeed.
        optimizer: one of ``OPTIMIZER_COPIES``.
        largest_layer: bytes of the largest layer, in the dtype of the weights.
        activations: bytes that one process would save for its batch without tensor parallelism.

    Raises:
        ConfigurationError: an unknown name, or degrees that do not divide each other.
    """
    if strategy not in DIVISIONS:
        raise ConfigurationError(f"strategy={strategy!r} is not one of {', '.join(DIVISIONS)}.")
    if optimizer not in OPTIMIZER_COPIES:
        raise ConfigurationError(f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZER_COPIES)}.")
    if pipeline_parallel > 1 and strategy != "megatron":
        raise ConfigurationError(
            f"pipeline_parallel={pipeline_parallel} with strategy={strategy!r}: only megatron's stages are estimated. "
            "`accel plan` shows those of a mesh."
        )
    size, factors = tensor_parallel, f"tensor_parallel={tensor_parallel}"
    if pipeline_parallel > 1:
        size, factors = size * pipeline_parallel, f"{factors} x pipeline_parallel={pipeline_parallel}"
    if min(num_processes, size) < 1 or num_processes % size:
        raise ConfigurationError(f"num_processes={num_processes} must be a positive multiple of {factors}.")
    data_parallel = num_processes // size
    if replicas < 1 or data_parallel % replicas:
        raise ConfigurationError(
            f"replicas={replicas} must divide num_processes / tensor_parallel = {num_processes} / {tensor_parallel} = "
            f"{data_parallel}."
        )
    activations = round(activations * (1 - _SHARDED_ACTIVATIONS + _SHARDED_ACTIVATIONS / tensor_parallel))
    if strategy == "megatron":
        # The first stage has most micro batches in flight: as many as there are stages.
        split, half = parameters / size, weight_bytes < 4
        state = split * 4 * (OPTIMIZER_COPIES[optimizer] + half) / data_parallel
        return TrainingMemory(strategy, round(split * weight_bytes), round(split * 4), round(state), 0, activations)
    values = (parameters - whole) / tensor_parallel + whole
    return memory_of_rank(
        strategy,
        values * weight_bytes,
        shards=data_parallel // replicas,
        processes=data_parallel,
        optimizer=optimizer,
        master_bytes=values * 4 if master_weights else 0,
        layer=largest_layer / tensor_parallel,
        activations=activations,
    )


def memory_of_rank(
    strategy: str,
    unsharded: float,
    *,
    shards: int,
    processes: int,
    optimizer: str = "adamw",
    master_bytes: float = 0,
    layer: float = 0,
    gathered_share: float = 1,
    activations: float = 0,
) -> TrainingMemory:
    """Return bytes on a process, computed from its weights without sharding; also used by ``accel plan``.

    Args:
        strategy: one of ``DIVISIONS``.
        unsharded: bytes of the weights that tensor parallelism leaves on this process.
        shards: processes that shard them.
        processes: processes that all-reduce gradients.
        optimizer: one of ``OPTIMIZER_COPIES``.
        master_bytes: bytes of float32 master weights of a half-precision model.
        layer: bytes of the largest gathered layer, after tensor parallelism.
        gathered_share: bytes of gathered weights per byte of weights: 0.5 if float32 weights are gathered in half
            precision.
        activations: what the forward saves for the backward.
    """
    division, copies = DIVISIONS[strategy], OPTIMIZER_COPIES[optimizer]
    state = master_bytes * (1 + copies) if master_bytes else unsharded * copies
    gathered = {
        "nothing": 0.0,
        "gradients": unsharded if processes > 1 else 0.0,
        "layers": 2 * layer * gathered_share + layer if shards > 1 else 0.0,
        "model": unsharded * gathered_share + layer if shards > 1 else 0.0,
    }
    return TrainingMemory(
        strategy=strategy,
        weights=round(unsharded / shards if division.weights else unsharded),
        gradients=round(unsharded / shards if division.gradients else unsharded),
        optimizer=round(state / shards if division.optimizer else state),
        buffers=round(gathered[division.gathers]),
        activations=round(activations),
    )


def estimate_training_usage(total: int, mixed_precision: str) -> dict[str, int]:
    """Return bytes in use at each stage of a training step with Adam on one process, without activations.

    In float32 the gradients equal the weights, and Adam holds two moments. Half precision by autocast keeps float32
    weights, and the forward needs a half-precision copy of them in addition to the gradients:
    https://huggingface.co/docs/transformers/model_memory_anatomy

    Args:
        total: bytes of the model in float32.
        mixed_precision: "float32", "float16" or "bfloat16".

    Returns:
        Bytes of "model", "gradients", "backward pass" and "optimizer step", and their "highest".

    Raises:
        ConfigurationError: another precision.
    """
    if mixed_precision not in ("float32", "float16", "bfloat16"):
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of float32, float16, bfloat16.")
    is_half = mixed_precision != "float32"
    stages = {
        "model": total,
        "gradients": total + total // 2 if is_half else total,
        "backward pass": 2 * total,
        "optimizer step": 2 * total if is_half else 4 * total,
    }
    return {**stages, "highest": max(stages.values())}
