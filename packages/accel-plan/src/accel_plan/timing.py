"""The time of a step: each operation by a roofline, messages by latency and bandwidth, and what of both overlaps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from accel_state.errors import ConfigurationError
from accel_state.hardware import HardwareProfile

from .memory import BACKWARD, FORWARD, RECOMPUTATION
from .operations import ATTENTION, KINDS, PRODUCT, Message, Operation, Passes
from .record import POINT_TO_POINT, sent_bytes
from .schedules import schedule_seconds

# Shares of a data sheet's numbers that training reaches. Fitted to torchtitan's six rows of Llama 3.1 8B on 8 and 128
# H100 (benchmarks/plan_time.py); the share of links is that of NCCL's own tests on NVLink.
SHARES: Mapping[str, float] = {"products": 0.485, "fp8": 0.445, "attention": 0.33, "memory": 0.87, "links": 0.80}
FITTED_ON = "h100-96gb"
FP8 = "fp8"
_RATES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_OF_UNITS = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat")
"""Operations with which FSDP 2 begins to gather the parameters of a unit, and to reduce its gradients."""
OPTIMIZER, HOST, BUBBLE = "clipping and optimizer", "waiting for the host", "pipeline bubble"
EXPOSED = "exposed communication"
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""DDP all-reduces gradients once those that are ready have so many bytes: its defaults, the first time and later."""


@dataclass(frozen=True)
class Span:
    """A part of the timeline of a step."""

    lane: str  # "compute", or that of messages
    what: str
    start: float  # seconds
    end: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step of one rank."""

    hardware: str
    seconds: float
    tokens: float  # a second and device
    utilization: float  # model FLOPs utilization, a share of the peak in the compute dtype
    parts: Mapping[str, float]  # seconds; they sum up to those of the step
    messages: Mapping[str, float]  # seconds that messages take by axis, exposed or not
    compiled: bool
    compared: bool  # whether the speeds of the device are measured in use, or fitted to runs on it
    bottleneck: str = ""
    overlaps_products: bool = False  # as of :class:`Speeds`


@dataclass
class _Lane:
    ends: list[float] = field(default_factory=list)
    waited: int = 0
    gate: float = 0.0  # when the last wait for a message ended
    free: float = 0.0


@dataclass(frozen=True, eq=False)  # a key of caches by its identity
class Speeds:
    """How long operations and messages take on a device.

    Args:
        hardware: the device.
        compiled: torch.compile fuses what is between two matrix products.
        fp8: matrix products in the blocks of the model have operands of 8 bits.
        overlaps_products: messages of tensor parallelism travel in pieces beside the products next to them, as with
            ``enable_async_tp``.
    """

    hardware: HardwareProfile
    compiled: bool = False
    fp8: bool = False
    overlaps_products: bool = False

    def share(self, name: str) -> float:
        """Return the share of a number of the profile that is reached."""
        return 1.0 if self.hardware.measured else SHARES[name]

    def seconds(self, item: Operation) -> float:
        """Of an operation: the longer one of computing and moving its bytes."""
        moved: float = item.fused_bytes if self.compiled else item.bytes
        bandwidth = self.hardware.memory_bandwidth * self.share("memory")
        if item.kind == PRODUCT and self.fp8 and "*" in item.module and item.dtype in ("bfloat16", "float16"):
            # Both operands are read, once more for their maximum unless a fused kernel found it, and written in 8 bits.
            moved = item.bytes * (2.0 if self.compiled else 3.0)
            return item.flops / (self.rate(FP8) * self.share("fp8")) + moved / bandwidth / 2
        computed = 0.0
        if item.flops:
            share = self.share("attention" if item.kind == ATTENTION else "products")
            computed = item.flops / (self.rate(_RATES.get(item.dtype, "fp32")) * share)
        return max(computed, moved / bandwidth)

    def rate(self, dtype: str) -> float:
        """FLOPs per second."""
        flops = self.hardware.flops
        if dtype not in flops:
            raise ConfigurationError(
                f"--hardware {self.hardware.key}: it has no {dtype} matrix products. There are: {', '.join(flops)}."
            )
        return flops[dtype]

    def message_seconds(self, message: Message) -> float:
        """Of a message: steps of a ring with their latency, and bytes by the narrowest link, as NCCL models it."""
        hardware, ranks, kind = self.hardware, message.ranks, message.kind
        nodes = Counter(rank // hardware.devices_per_node for rank in ranks)
        sent = sent_bytes(kind, message.payload, 2 if kind in POINT_TO_POINT else len(ranks))
        link = network = float("inf")
        if max(nodes.values()) > 1:
            link = self._known(hardware.link_bandwidth, "link_bandwidth", len(ranks), len(nodes))
        if len(nodes) > 1:
            network = self._known(hardware.network_bandwidth, "network_bandwidth", len(ranks), len(nodes))
        near = min(nodes.values())
        if kind == "all-to-all":
            # What a rank sends to each other one is for that one alone, and leaves the node through its own port.
            portion = message.payload / len(ranks)
            moving = max(portion * (near - 1) / link, portion * (len(ranks) - near) / network)
        else:
            # Rings enter and leave a node through the ports of all its devices in the group.
            moving = sent / min(link, network * near)
        steps, between = len(ranks) - 1, len(nodes) - 1
        if kind in POINT_TO_POINT or kind == "broadcast":
            steps, between = 1, min(between, 1)
        elif kind == "all-reduce":
            steps, between = 2 * steps, 2 * between
        latency = (steps - between) * hardware.link_latency + between * hardware.network_latency
        return hardware.message_seconds + latency + moving / self.share("links")

    def _known(self, value: float | None, name: str, ranks: int, nodes: int) -> float:
        if value is None:
            raise ConfigurationError(
                f"--hardware {self.hardware.key}: its profile has no {name}, and {ranks} ranks are on {nodes} "
                f"node{'s' if nodes > 1 else ''}. Give a file of a profile that has one."
            )
        return value


class Simulation:
    """Runs a step's operations on one device: computation, and a lane for each kind of message.

    Attributes:
        clock: seconds, of the computation.
        parts: seconds by what they were spent on.
        messages: seconds by axis.
        spans: the timeline, if it was asked for.
    """

    def __init__(self, speeds: Speeds, timeline: bool = False) -> None:
        self.speeds = speeds
        self.clock: float = 0.0
        self.parts: defaultdict[str, float] = defaultdict(float)
        self.messages: defaultdict[str, float] = defaultdict(float)
        self.phases: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self._timeline = timeline
        self._lanes: dict[str, _Lane] = {}
        self._host = 0.0
        self._copied_in = 0.0
        self._durations: dict[Message, float] = {}
        self._product = 0.0  # seconds of the last product, if no message has travelled beside it
        self._arriving: tuple[Message, float] | None = None  # what travels beside the next product, and its seconds
        self._bucket: list[tuple[Operation, Message]] = []
        self._bucket_bytes = FIRST_BUCKET_BYTES

    def run(self, items: Iterable[Operation]) -> None:
        """Run operations after those before."""
        for item in items:
            before = self.clock
            if item.message is not None:
                self._send(item, item.message)
            elif item.lane and self.speeds.hardware.overlaps:
                self._run_in_lane(item)
            else:
                self._compute(item)
            self.phases[item.phase] += self.clock - before

    def finish(self) -> float:
        """Wait for all messages, and return the seconds of the step."""
        self._send_bucket()
        self._arrive(0.0)
        for name, lane in self._lanes.items():
            self._wait_until(lane.free, name)
            lane.waited = len(lane.ends)
        return self.clock

    def _compute(self, item: Operation) -> None:
        for name, count in item.waits:
            if self._bucket and self._bucket[0][1].lane == name:
                self._send_bucket()
            lane = self._lanes.get(name)
            if lane is not None:
                lane.waited = min(lane.waited + count, len(lane.ends))
                self._wait_until(lane.ends[lane.waited - 1], name)
                lane.gate = self.clock
        duration, overhead = self.speeds.seconds(item), 0.0
        if not (item.fused and self.speeds.compiled):
            overhead = item.calls * self.speeds.hardware.operation_seconds
        if item.name in _OF_UNITS:
            overhead += self.speeds.hardware.unit_seconds
        part = item.kind if item.phase in _MODEL else OPTIMIZER
        if not self.speeds.hardware.overlaps:
            duration += overhead
        else:
            self._host += overhead
            if self._host > self.clock:
                self.parts[HOST] += self._host - self.clock
                self.clock = self._host
        self._span("compute", f"{item.name} {item.module}", self.clock, duration)
        self.parts[part] += duration
        self.clock += duration
        if item.kind == PRODUCT:
            self._arrive(duration)
            self._product = duration

    def _arrive(self, product: float) -> None:
        """Wait for the rest of a message that travels beside a product of so many seconds."""
        if self._arriving is not None:
            (message, duration), self._arriving = self._arriving, None
            self._wait_until(self.clock + _beside(product, duration, len(message.ranks)), message.lane)

    def _send(self, item: Operation, message: Message) -> None:
        if message.axis == "pp" or message.kind in POINT_TO_POINT:
            return  # the schedule of the pipeline has them
        if message.bucketed:
            self._bucket.append((item, message))
            if sum(one.payload for _, one in self._bucket) >= self._bucket_bytes:
                self._send_bucket()
            return
        self._send_now(item, message)

    def _send_bucket(self) -> None:
        """Send the gradients that DDP has put into one bucket since the last one."""
        if not self._bucket:
            return
        bucket, self._bucket, self._bucket_bytes = self._bucket, [], BUCKET_BYTES
        item, message = bucket[-1]
        self._send_now(item, replace(message, payload=sum(one.payload for _, one in bucket)))
        lane = self._lanes[message.lane]
        lane.ends += lane.ends[-1:] * (len(bucket) - 1)

    def _send_now(self, item: Operation, message: Message) -> None:
        if message not in self._durations:
            self._durations[message] = self.speeds.message_seconds(message)
        duration = self._durations[message]
        self.messages[message.axis] += duration
        lane = self._lanes.setdefault(message.lane, _Lane())
        beside = self.speeds.overlaps_products and self.speeds.hardware.overlaps and message.axis == "tp"
        if beside and message.kind in ("all-gather", "reduce-scatter"):
            self._arrive(0.0)
            if message.kind == "all-gather":
                self._arriving, duration = (message, duration), 0.0
            else:
                duration, self._product = _beside(self._product, duration, len(message.ranks)), 0.0
        ready = lane.gate if message.early else self.clock
        if message.after in self._lanes:
            ready = self._lanes[message.after].free
        start = max(lane.free, ready) + self._copied_in
        self._copied_in = 0.0
        lane.free = start + duration
        lane.ends.append(lane.free)
        self._span(message.lane, f"{message.kind} {item.module}", start, duration)
        if not self.speeds.hardware.overlaps:
            self._wait_until(lane.free, message.lane)

    def _run_in_lane(self, item: Operation) -> None:
        duration, lane = self.speeds.seconds(item), self._lanes.get(item.lane)
        if lane is None or not lane.ends:
            self._copied_in += duration
            return
        lane.free += duration
        lane.ends[-1] = lane.free

    def _wait_until(self, when: float, lane: str) -> None:
        if when > self.clock:
            self.parts[f"{EXPOSED}, {lane.split(' ', 1)[1]}"] += when - self.clock
            self.clock = when

    def _span(self, lane: str, what: str, start: float, duration: float) -> None:
        if self._timeline and duration > 0:
            self.spans.append(Span(lane, what, start, start + duration))


def _beside(product: float, message: float, ranks: int) -> float:
    """Return seconds that a message adds to a product, if both are divided into as many pieces as there are ranks.

    A piece of one waits for a piece of the other, so that the longer one and a piece of the shorter one remain.
    """
    return max(product, message) + min(product, message) / ranks - product


_MODEL = (FORWARD, BACKWARD, RECOMPUTATION)


def simulate(passes: Passes, speeds: Speeds, timeline: bool = False) -> Simulation:
    """Run the passes of a step and its update."""
    simulation = Simulation(speeds, timeline)
    for times, items in passes:
        for _ in range(times):
            simulation.run(items)
    simulation.finish()
    return simulation


def model_flops(passes: Passes) -> int:
    """FLOPs of a step without recomputation: three times those of the forward passes.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; attention as it is computed, so half of it if it is
    causal.
    """
    return 3 * sum(times * sum(item.flops for item in items if item.phase == FORWARD) for times, items in passes)


def step_time(passes: Passes, speeds: Speeds, tokens: int, ranks: int, dtype: str, bubble: float = 0.0) -> StepTime:
    """Return the time of a step.

    Args:
        passes: its operations on this rank.
        speeds: of the device.
        tokens: of all ranks in a step.
        ranks: number of ranks.
        dtype: of the computation: bf16, fp16 or fp32.
        bubble: seconds in which the rank waits for other stages of a pipeline.
    """
    simulation = simulate(passes, speeds)
    ordered = {name: simulation.parts[name] for name in (*KINDS, OPTIMIZER)}
    parts = {**ordered, **simulation.parts, BUBBLE: bubble}
    seconds = sum(parts.values())
    return StepTime(
        hardware=speeds.hardware.key,
        seconds=seconds,
        tokens=tokens / seconds / ranks,
        utilization=model_flops(passes) / seconds / speeds.rate(dtype),
        parts={name: value for name, value in parts.items() if value > 0},
        messages=dict(simulation.messages),
        compiled=speeds.compiled,
        compared=speeds.hardware.measured or speeds.hardware.key == FITTED_ON,
        bottleneck=bottleneck(parts, seconds),
        overlaps_products=speeds.overlaps_products,
    )


def bubble_seconds(
    ranks: Sequence[Passes], position: int, schedule: str, micro_batches: int, stages: int, speeds: Speeds
) -> float:
    """Return seconds of a step in which a rank of a pipeline waits for others.

    Args:
        ranks: the operations of each rank.
        position: of the rank.
        schedule: one of :data:`~.schedules.TIMED_SCHEDULES`.
        micro_batches: of a pass.
        stages: per rank.
        speeds: of the devices.
    """
    batches = sum(times for times, items in ranks[position] if any(item.phase == FORWARD for item in items))
    busy = [simulate(passes, speeds).phases for passes in ranks]
    number = micro_batches * batches
    forward = [phases[FORWARD] / number for phases in busy]
    backward = [(phases[BACKWARD] + phases[RECOMPUTATION]) / number for phases in busy]
    sent = [
        speeds.message_seconds(item.message)
        for _, items in ranks[position]
        for item in items
        if item.message is not None and item.message.kind in POINT_TO_POINT
    ]
    message = sum(sent) / len(sent) if sent else 0.0
    # Where ranks share processors, those that work get the time of those that wait, but all work is to be done.
    alone = speeds.hardware.alone_speedup
    total = schedule_seconds(
        schedule, [one / alone for one in forward], [one / alone for one in backward], micro_batches, stages, message
    )
    if alone > 1:
        total = max(total, micro_batches * sum((*forward, *backward)) / len(busy))
    return batches * max(total - micro_batches * (forward[position] + backward[position]), 0.0)


def bottleneck(parts: Mapping[str, float], seconds: float) -> str:
    """Return one sentence on what takes most of a step."""
    name, value = max(parts.items(), key=lambda item: item[1])
    share = f"{value / seconds:.0%} of the step"
    if name.startswith(EXPOSED):
        axis = name.removeprefix(f"{EXPOSED}, ")
        what = f"Communication over {axis} that nothing hides takes"
        return f"{what} {share}: larger batches or a smaller {axis} hide more."
    sentences = {
        PRODUCT: "Matrix products take {}: a faster dtype (bf16, fp8) or more devices shorten it.",
        ATTENTION: "Attention takes {}: splitting sequences over more devices shortens it.",
        OPTIMIZER: "Clipping and the optimizer take {}: sharding over more ranks or a fused optimizer shortens them.",
        HOST: "The device waits for the host during {}: torch.compile or larger batches shorten it.",
        BUBBLE: "The pipeline is idle during {}: more micro batches or interleaved stages shorten it.",
    }
    return sentences.get(name, "Operations limited by memory bandwidth take {}: torch.compile fuses them.").format(
        share
    )
