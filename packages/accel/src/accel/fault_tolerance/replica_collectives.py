"""Collectives between the replicas of a step, over torchft's process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from accel_state.collectives.single import Collectives


class ReplicaCollectives(Collectives):
    """What a reduction of gradients needs of the replicas that compute a step.

    If a collective fails, because a replica was killed, the step cannot be committed any more: the error is reported,
    and the results are zeros from then on.

    Args:
        group: torchft's process group.
        rank: this replica.
        world_size: replicas.
        leads: returns whether this replica leads, which is sent along with what is gathered.
        fail: called with the error of the first collective that fails.
    """

    def __init__(
        self, group: Any, rank: int, world_size: int, leads: Callable[[], bool], fail: Callable[[Exception], None]
    ) -> None:
        self.rank: int = rank
        self.world_size: int = world_size
        self._group, self._leads, self._fail = group, leads, fail
        self._failed = False
        self._leaders: list[int] | None = None

    @classmethod
    def alone(cls) -> ReplicaCollectives:
        """Return those of a replica that has not joined the others yet."""
        return cls(None, 0, 1, lambda: False, lambda error: None)

    @property
    def leaders(self) -> list[int]:
        """The replicas that lead; those of other replicas are known when the gradients were reduced."""
        own = [self.rank] if self._leads() else []
        return own if self._leaders is None else self._leaders

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        received = tensor.new_empty(sum(sizes))
        sent = [tensor.numel() // self.world_size] * self.world_size
        self._run(lambda: self._group.alltoall_base(received, tensor, list(sizes), sent, AllToAllOptions()), received)
        return received

    def all_gather(self, tensor: torch.Tensor, operation: str = "all_gather") -> torch.Tensor:
        own = torch.cat([tensor.detach().reshape(-1), tensor.new_full((1,), float(self._leads()))])
        gathered = own.new_empty(self.world_size, own.numel())
        self._run(lambda: self._group.allgather([list(gathered.unbind())], [own], AllgatherOptions()), gathered)
        self._leaders = gathered[:, -1].nonzero().flatten().tolist()
        return gathered[:, :-1].reshape(self.world_size, *tensor.shape)

    def _run(self, call: Callable[[], Any], result: torch.Tensor) -> None:
        if not self._failed:
            try:
                call().wait()
                return
            except RuntimeError as error:
                self._failed = True
                self._fail(error)
        result.zero_()
