"""The memory of training, per process."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.errors import ConfigurationError

# Bytes that the state of an optimizer takes for each byte of weights it updates.
OPTIMIZER_COPIES = {"adam": 2, "adamw": 2, "sgd": 0, "sgd_momentum": 1}
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Those that are shown where none is asked for."""


@dataclass(frozen=True)
class Division:
    """What a strategy divides among the processes that have data of their own.

    Attributes:
        weights: the weights, between steps.
        gradients: the gradients, when a step is taken.
        optimizer: the state of the optimizer.
        gathers: what is put together to compute: "nothing", "layers" (one after the other) or "model" (all, until the
            backward is over); or "gradients", which DDP holds a second time.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    gathers: str = "nothing"


_ALL_SHARED = Division(weights=True, gradients=True, optimizer=True, gathers="layers")
_UNTIL_BACKWARD = Division(weights=True, gradients=True, optimizer=True, gathers="model")

DIVISIONS = {
    "ddp": Division(gathers="gradients"),
    "fsdp": _ALL_SHARED,
    "zero1": Division(optimizer=True),
    "zero2": Division(gradients=True, optimizer=True),
    "zero3": _ALL_SHARED,
    "zero0": Division(),
    "shard_grad_op": _UNTIL_BACKWARD,
    "no_shard": Division(),
    "hybrid_shard": _ALL_SHARED,
    "hybrid_shard_zero2": _UNTIL_BACKWARD,
    "fsdp2": _ALL_SHARED,
    "fsdp2_no_reshard": _UNTIL_BACKWARD,
}
"""Every strategy that is known: FSDP's sharding strategies (``fsdp`` is FULL_SHARD), version 2 of it, and DeepSpeed's
stages.
"""

# Of the 34 bytes of activations for each of s*b*h values of a layer, 24 are divided by tensor parallelism and 10 are
# not: # Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, equations
# 2 and 4.
_SHARED_ACTIVATIONS = 24 / 34


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each process while a model is trained, at the end of a backward pass.

    Attributes:
        strategy: how the model is shared, one of :data:`DIVISIONS`.
        weights: the process's own weights.
        gradients: the gradients it keeps until the step.
        optimizer: the state of the optimizer, and the float32 weights that it updates where the model's are of half
            precision.
        buffers: what communication needs: DDP's copies of the gradients, or the layer that sharded training puts
            together.
        activations: what the forward keeps for the backward.
    """

    strategy: str
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations


def estimate_training(
    parameters: int,
    strategy: str = "ddp",
    *,
    num_processes: int = 1,
    tensor_parallel: int = 1,
    replicas: int = 1,
    whole: int = 0,
    weight_bytes: float = 4.0,
    master_weights: bool = False,
    optimizer: str = "adamw",
    largest_layer: int = 0,
    activations: int = 0,
) -> TrainingMemory:
    """Bytes per process of training a model of which all parameters are trained.

    With N values, b bytes each, k copies of the optimizer, and d = num_processes / (tensor_parallel * replicas)
    processes that share a copy of the model: weights N*b, gradients N*b, optimizer N*b*k; or, with float32 master
    weights beside a half-precision model, N*4*(1 + k). ZeRO 1 divides the optimizer by d, ZeRO 2 the gradients too,
    ZeRO 3 and FSDP the weights too (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5). Tensor parallelism divides
    all of them before, but for ``whole`` values. ZeRO 3 and FSDP put a layer together to compute with it, and the next
    one ahead of time: twice the largest layer, and its gradients before they are reduced; SHARD_GRAD_OP keeps the whole
    model together until the backward is over. DDP on several processes holds the gradients a second time, in buckets.
    Activations are divided by tensor parallelism as far as they are inside attention and feed-forward
    (arXiv:2205.05198).

    Args:
        parameters: number of trained values.
        strategy: one of ``DIVISIONS``.
        num_processes: the world size.
        tensor_parallel: processes that share each layer.
        replicas: copies of the model that are divided each by itself, as with the hybrid strategies or an axis
            dp_replicate.
        whole: those of the values that tensor parallelism leaves whole (norms, and embeddings that no plan divides).
        weight_bytes: bytes of a value of weights and gradients: 4; 2 for a model that is itself in half precision.
            Mixed precision by autocast keeps 4.
        master_weights: keep float32 weights and averages in the optimizer beside half-precision weights, as DeepSpeed
            does.
        optimizer: one of ``OPTIMIZER_COPIES``.
        largest_layer: bytes of the largest layer, in the type of the weights.
        activations: bytes that one process would keep for its batch without tensor parallelism.

    Raises:
        ConfigurationError: an unknown name, or degrees that do not divide each other.
    """
    _check(strategy, optimizer, num_processes, tensor_parallel, replicas)
    values = (parameters - whole) / tensor_parallel + whole
    return memory_of_rank(
        strategy,
        values * weight_bytes,
        shards=num_processes // (tensor_parallel * replicas),
        processes=num_processes // tensor_parallel,
        optimizer=optimizer,
        master_bytes=values * 4 if master_weights else 0,
        layer=largest_layer / tensor_parallel,
        activations=activations * (1 - _SHARED_ACTIVATIONS + _SHARED_ACTIVATIONS / tensor_parallel),
    )


def memory_of_rank(
    strategy: str,
    own: float,
    *,
    shards: int,
    processes: int,
    optimizer: str = "adamw",
    master_bytes: float = 0,
    layer: float = 0,
    gathered_share: float = 1,
    activations: float = 0,
) -> TrainingMemory:
    """Bytes on a process, from those that it would hold without sharding: the arithmetic of the estimate and of ``accel
    plan``.

    Args:
        strategy: one of ``DIVISIONS``.
        own: bytes of the weights that tensor parallelism leaves to this process.
        shards: processes that divide them.
        processes: processes that reduce gradients with one another.
        optimizer: one of ``OPTIMIZER_COPIES``.
        master_bytes: bytes of the same weights in float32, where the optimizer keeps such beside half-precision ones.
        layer: bytes of the largest layer that is put together, of the weights that tensor parallelism leaves to this
            process.
        gathered_share: bytes of gathered weights for each byte of the weights themselves: a half where float32 weights
            are gathered in half precision.
        activations: what the forward keeps for the backward.
    """
    division, copies = DIVISIONS[strategy], OPTIMIZER_COPIES[optimizer]
    state = master_bytes * (1 + copies) if master_bytes else own * copies
    gathered = {
        "nothing": 0.0,
        "gradients": own if processes > 1 else 0.0,
        "layers": 2 * layer * gathered_share + layer if shards > 1 else 0.0,
        "model": own * gathered_share + layer if shards > 1 else 0.0,
    }
    return TrainingMemory(
        strategy=strategy,
        weights=round(own / shards if division.weights else own),
        gradients=round(own / shards if division.gradients else own),
        optimizer=round(state / shards if division.optimizer else state),
        buffers=round(gathered[division.gathers]),
        activations=round(activations),
    )


def estimate_training_usage(total: int, mixed_precision: str) -> dict[str, int]:
    """Bytes in use at each stage of a training step with Adam on one process, without activations.

    In float32 the gradients equal the weights, and Adam holds two averages. In half precision by autocast the weights
    stay in float32, and computing needs a half-precision copy of them beside the gradients:
    https://huggingface.co/docs/transformers/model_memory_anatomy

    Args:
        total: bytes of the model in float32.
        mixed_precision: "float32", "float16" or "bfloat16".

    Returns:
        Bytes of "model", "gradients", "backward pass" and "optimizer step", and their "highest".

    Raises:
        ConfigurationError: another precision.
    """
    if mixed_precision == "float32":
        stages = {"model": total, "gradients": total, "backward pass": 2 * total, "optimizer step": 4 * total}
    elif mixed_precision in ("float16", "bfloat16"):
        stages = {
            "model": total,
            "gradients": total + total // 2,
            "backward pass": 2 * total,
            "optimizer step": 2 * total,
        }
    else:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} is not one of float32, float16, bfloat16: models are not trained in "
            "it."
        )
    return {**stages, "highest": max(stages.values())}


def _check(strategy: str, optimizer: str, num_processes: int, tensor_parallel: int, replicas: int) -> None:
    if strategy not in DIVISIONS:
        raise ConfigurationError(f"strategy={strategy!r} is not one of {', '.join(DIVISIONS)}.")
    if optimizer not in OPTIMIZER_COPIES:
        raise ConfigurationError(f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZER_COPIES)}.")
    if min(num_processes, tensor_parallel) < 1 or num_processes % tensor_parallel:
        raise ConfigurationError(
            f"{num_processes} process(es) cannot be shared by tensor parallelism of {tensor_parallel}: the degree "
            "must divide their number."
        )
    if replicas < 1 or num_processes // tensor_parallel % replicas:
        raise ConfigurationError(
            f"{num_processes} process(es) with tensor parallelism of {tensor_parallel} cannot hold {replicas} copies "
            "of the model: their "
            f"number must divide {num_processes // tensor_parallel}."
        )
