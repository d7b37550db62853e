"""A worker of Ray Train (``ray.train.torch.TorchTrainer``)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Environment, Variables


@dataclass(frozen=True)
class RayTrainEnvironment(Environment):
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT, and Ray's RAY_JOB_ID.

    Unlike torchrun, it sets NODE_RANK instead of GROUP_RANK, and its nodes may have different numbers of workers.
    It does not say how many nodes there are: the number is exact if all have as many workers as this one.
    """

    name = "ray_train"

    @classmethod
    def read(cls, variables: Variables) -> Environment | None:
        """See the base class; None in other processes of Ray."""
        ours = all(name in variables for name in ("RAY_JOB_ID", "NODE_RANK", "RANK"))
        if not ours or "GROUP_RANK" in variables:
            return None
        because = "NODE_RANK"
        world_size = variables.required("WORLD_SIZE", because, minimum=1)
        local_world_size = variables.required("LOCAL_WORLD_SIZE", because, minimum=1)
        node_rank = variables.required("NODE_RANK", "RAY_JOB_ID")
        return cls(
            variables.required("RANK", because),
            world_size,
            variables.required("LOCAL_RANK", because),
            local_world_size,
            node_rank,
            max(-(-world_size // local_world_size), node_rank + 1),
            variables.text("MASTER_ADDR"),
            variables.integer("MASTER_PORT", minimum=1),
        )
