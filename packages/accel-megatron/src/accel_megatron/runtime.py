"""Loading Megatron-core, and its process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel_state.errors import ConfigurationError

from ._megatron_compat import parallel_state
from .plugin import MegatronLMPlugin

DEVICES = {"cuda"}
"""The devices that Megatron-core runs on. `accel_megatron.testing` adds the CPU."""


def check_device(device: torch.device) -> None:
    """Raise ConfigurationError on a device that Megatron-core does not run on."""
    if device.type not in DEVICES:
        raise ConfigurationError(
            f"Megatron-core runs on CUDA devices only, and this process uses {device.type}. Here, tensor and pipeline "
            "parallelism are available with ParallelismConfig(tp_size=..., pp_size=...), without Megatron-core."
        )


def initialise(plugin: MegatronLMPlugin, world_size: int) -> None:
    """Create the process groups of all kinds of parallelism; a collective call."""
    plugin.check_world(world_size)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        context_parallel_size=plugin.context_parallel_size,
        expert_model_parallel_size=plugin.expert_model_parallel_size,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
    )


def seed_generators() -> None:
    """Seed the generators of dropout from torch's seed on rank 0, differently for each data-parallel rank.

    Tensor-parallel ranks share the generator of what they compute alike. A collective call.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed: list[Any] = [torch.initial_seed() % (1 << 31)]
    dist.broadcast_object_list(seed, 0)
    state = torch.get_rng_state()
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    model_parallel_cuda_manual_seed(seed[0] + 100_003 * rank, force_reset_rng=True)
    torch.set_rng_state(state)  # the generator of the host belongs to the script


def destroy() -> None:
    """Destroy the process groups."""
    if dist.is_initialized() and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def data_mesh(device_type: str) -> Any:
    """Return the ranks as a mesh over Megatron-core's own process groups, for sharding data."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp_replicate": parallel_state.get_data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }
    ranks = torch.arange(dist.get_world_size()).view([group.size() for group in groups.values()])
    return DeviceMesh.from_group(list(groups.values()), device_type, ranks, mesh_dim_names=tuple(groups))
