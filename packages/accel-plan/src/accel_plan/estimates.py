"""Seconds and bytes of a step in closed form: the order in which ``accel plan --auto`` plans configurations.

They are made of the operations and the memory of one sample, without messages. They need not be exact, because only
plans are compared in the end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from accel_state.hardware import HardwareProfile

from .candidates import AXES, FULL, NONE, SELECTIVE, Candidate, Shape
from .changes import with_values
from .memory import BACKWARD, FORWARD
from .operations import OTHER, Message, Operation
from .plan import PlanRequest, is_compiled, make_plan
from .timing import Speeds

# Messages of hidden states in a block under tensor parallelism: two gathers and two reductions forward, and as many
# backward. A recomputation gathers twice, and reduces once unless it keeps the sums (docs/guides/planning.md).
_TENSOR_MESSAGES, _TENSOR_AGAIN = 8, {NONE: 0, SELECTIVE: 2, FULL: 3}
_KEPT_BY_SELECTIVE = 16 / 34
"""Share of a block's activations that are results of matrix products and attention.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section
4.1.
"""


@dataclass(frozen=True)
class _Traced:
    """A rank with one sample and a model that is not split, without messages."""

    forward: float  # seconds
    backward: float
    others: float  # of the blocks' forward pass, besides matrix products and attention
    update: tuple[Operation, ...]  # clipping and the optimizer, of all parameters
    host: float  # preparing all operations of a pass
    weights: int  # bytes
    activations: float  # bytes per token, of all blocks
    element: int  # bytes of a value in the compute dtype


class Estimates:
    """Of configurations of one model.

    Args:
        request: the model, and the settings that all configurations have in common.
        shape: of the model.
        hardware: the device.
        length: tokens of a sample.
        precision: of all of them.
    """

    def __init__(
        self, request: PlanRequest, shape: Shape, hardware: HardwareProfile, length: int, precision: str
    ) -> None:
        self._request, self._shape, self._hardware, self._length = request, shape, hardware, length
        self._compiled, self._precision = is_compiled(request.settings), precision
        self._speeds = Speeds(replace(hardware, operation_seconds=0.0), self._compiled)
        self._updates: dict[int, float] = {}

    def bytes(self, item: Candidate) -> float:
        """Needed at the peak of a step, with the allocator's reserve: the rest of the reserve is small."""
        traced, shape, axes = self._traced, self._shape, item.axes
        weights = traced.weights / item.split
        tokens = item.batch_size * self._length / item.sequence / axes["tp"]
        if axes["pp"] > 1:  # of the first stage
            tokens *= min(axes["pp"], item.micro_batches) / item.micro_batches
        kept = {NONE: 1.0, SELECTIVE: _KEPT_BY_SELECTIVE, FULL: 1 / shape.blocks}[item.checkpointing]
        # Tensor parallelism gathers the hidden states twice in a block, and keeps them unless they are computed again.
        whole = 0 if axes["tp"] == 1 else 2 * shape.hidden * traced.element * axes["tp"]
        whole *= shape.blocks if item.checkpointing == NONE else 1
        inputs = 0 if item.checkpointing == NONE else shape.blocks * shape.hidden * traced.element
        loss = shape.vocabulary * (traced.element + 3 * 4)  # logits; in float32 their log-softmax and two gradients
        blocks = (traced.activations * kept + whole + inputs) / axes["pp"]
        gathered = unreduced = 0.0
        if item.shards > 1:
            gathered = 2 * shape.vocabulary * shape.hidden / axes["tp"] * traced.element
            unreduced = weights if item.steps > 1 else 0.0  # gradients accumulate whole
        peak = 4 * weights / item.shards + gathered + unreduced + tokens * (blocks + loss)
        return peak * (1 + self._hardware.allocator_share)

    def seconds(self, item: Candidate) -> float:
        """Of an optimizer step."""
        traced, axes, overlaps = self._traced, item.axes, self._hardware.overlaps
        share = item.batch_size / (item.split * item.sequence)
        again = {NONE: 0.0, SELECTIVE: traced.others, FULL: traced.forward}[item.checkpointing]
        forward, backward = traced.forward * share, (traced.backward + again) * share
        gather, reduce = self._data_messages(item, traced)
        blocks = max(self._shape.blocks // axes["pp"], 1)
        behind_forward, behind_backward = (forward / blocks, backward / blocks) if overlaps else (0.0, 0.0)
        # Computation hides messages, but for the first gather and the last reduction.
        hidden = 1 if overlaps else 0
        waits = hidden * gather + blocks * (max(0.0, gather - behind_forward) + max(0.0, gather - behind_backward))
        host = traced.host / axes["pp"] * (1.0 if item.checkpointing == NONE else 4 / 3) * item.micro_batches
        computed = forward + backward if overlaps else forward + backward + host
        computed = (computed + blocks * self._model_messages(item, traced)) * self._bubble(item)
        micro = max(computed, host) if overlaps else computed
        reduction = hidden * reduce + blocks * max(0.0, reduce - behind_backward)
        update = self._update_seconds(item.shards * axes["tp"]) / axes["pp"]
        return item.steps * (micro + waits) + reduction + update

    def _bubble(self, item: Candidate) -> float:
        """Return how many times its work a rank of a pipeline takes."""
        alone = self._hardware.alone_speedup
        stages = 2 if item.schedule == "interleaved1f1b" else 1
        waiting = 1 + (item.axes["pp"] - 1) / item.micro_batches / stages
        # Where ranks share processors, those that work get the time of those that wait.
        return waiting if item.axes["pp"] == 1 or alone <= 1 else max(1.0, waiting / alone)

    def _update_seconds(self, parts: int) -> float:
        """Of clipping and the optimizer, if each parameter is divided into so many parts."""
        if parts not in self._updates:
            items, host = self._traced.update, self._hardware.operation_seconds
            divided = (_times(one, 1 / parts) for one in items)
            self._updates[parts] = sum(self._speeds.seconds(one) + one.calls * host for one in divided)
        return self._updates[parts]

    def _data_messages(self, item: Candidate, traced: _Traced) -> tuple[float, float]:
        """Return seconds in which the parameters of a block are gathered, and its gradients reduced."""
        size = traced.weights / self._shape.blocks / item.axes["tp"]
        gather = reduce = 0.0
        if item.shards > 1:
            gather = self._message("all-gather", size * traced.element / 4, item.shards, item.split)
            reduce = self._message("reduce-scatter", size, item.shards, item.split)
        if item.axes["dp_replicate"] > 1:
            copies, stride = item.axes["dp_replicate"], item.split * item.shards
            reduce += self._message("all-reduce", size / item.shards, copies, stride)
        return gather, reduce

    def _model_messages(self, item: Candidate, traced: _Traced) -> float:
        """Return seconds of the messages of a block that its computation waits for."""
        axes, shape, number = item.axes, self._shape, item.micro_batches
        tokens = item.batch_size / number * self._length * traced.element
        again = 0 if item.checkpointing == NONE else 1
        kinds = []  # messages of a micro batch: how many, and what they are
        if axes["tp"] > 1:
            size = tokens * shape.hidden / item.sequence
            kinds.append((_TENSOR_MESSAGES + _TENSOR_AGAIN[item.checkpointing], "all-gather", size, axes["tp"], 1))
        if axes["cp"] > 1:  # keys and values, and their gradients
            size = tokens * 2 * shape.key_heads * shape.head / axes["tp"]
            kinds.append((3, "all-gather", size, axes["cp"], axes["tp"]))
        if axes["sp"] > 1:  # queries, keys, values and results
            size = tokens * 2 * (shape.heads + shape.key_heads) * shape.head / axes["tp"] / axes["sp"]
            kinds.append((2 + again, "all-to-all", size, axes["sp"], axes["tp"]))
        return number * sum(
            times * self._message(kind, size, ranks, stride) for times, kind, size, ranks, stride in kinds
        )

    def _message(self, kind: str, payload: float, ranks: int, stride: int) -> float:
        group = tuple(range(0, ranks * stride, stride))
        return self._speeds.message_seconds(Message(kind, "", group, int(payload), ""))

    @functools.cached_property
    def _traced(self) -> _Traced:
        settings, one = self._request.settings, dict.fromkeys(AXES, 1)
        processes = int(settings["num_processes"])
        base = Candidate({**one, "dp_shard": processes}, 1, 1, NONE, self._precision)
        plan = make_plan(replace(self._request, settings=with_values(settings, base.values()), batch_size=1, rank=0))
        items = [item for _, part in plan.operations for item in part if item.message is None and not item.lane]
        passes = [item for item in items if item.phase in (FORWARD, BACKWARD)]
        seconds = {
            phase: sum(self._speeds.seconds(item) for item in passes if item.phase == phase)
            for phase in (FORWARD, BACKWARD)
        }
        blocks = [item for item in passes if item.phase == FORWARD and item.kind == OTHER and item.block is not None]
        element = 4 if self._precision == "no" else 2
        logits = self._length * self._shape.vocabulary * (element + 2 * 4)
        return _Traced(
            forward=seconds[FORWARD],
            backward=seconds[BACKWARD],
            others=sum(map(self._speeds.seconds, blocks)),
            update=tuple(_times(item, processes) for item in items if item.phase not in (FORWARD, BACKWARD)),
            host=sum(item.calls for item in passes if not (item.fused and self._compiled))
            * self._hardware.operation_seconds,
            weights=4 * plan.parameters,
            activations=max(plan.memory.activations - logits, plan.memory.activations // 10) / self._length,
            element=element,
        )


def _times(item: Operation, number: float) -> Operation:
    """Return an operation on so many times the bytes."""
    return replace(item, bytes=int(item.bytes * number), fused_bytes=int(item.fused_bytes * number))
