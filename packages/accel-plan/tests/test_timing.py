"""The time of a step: rooflines, messages, what overlaps, the bubble of pipelines, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from plan_models import write_llama

from accel_launch.config.read import load_settings
from accel_plan.command import COMMAND
from accel_plan.memory import BACKWARD, FORWARD, RECOMPUTATION, STEP
from accel_plan.operations import OTHER, PRODUCT, Message, Operation, OperationRecorder, more_operations
from accel_plan.plan import PlanRequest, RankPlan, make_plan
from accel_plan.report import as_text
from accel_plan.schedules import schedule_seconds
from accel_plan.timing import BUBBLE, EXPOSED, HOST, OPTIMIZER, SHARES, Speeds, bubble_seconds, simulate, step_time
from accel_state.errors import ConfigurationError
from accel_state.hardware import HardwareProfile, profile

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="the models are those of transformers"
)
pytestmark = pytest.mark.timeout(600)

# A device on which a FLOP takes 1 ns, a byte of its memory 1 us, one of a link 1 ms, and one of the network 10 ms.
DEVICE = HardwareProfile(
    key="slow",
    names=(),
    memory_bytes=1000,
    memory_bandwidth=1e6,
    flops={"bf16": 1e9, "fp32": 1e8, "fp8": 2e9},
    link_bandwidth=1e3,
    link_latency=1.0,
    network_bandwidth=1e2,
    network_latency=10.0,
    message_seconds=0.5,
    operation_seconds=1e-9,
    devices_per_node=4,
    sources={},
    measured=True,
)
FAST_LINKS = replace(DEVICE, link_latency=1e-9, message_seconds=1e-9)


def product(flops: int, block: int | None = 0, phase: str = FORWARD, **changed: Any) -> Operation:
    return replace(Operation(block, phase, PRODUCT, "mm", "layers.*", "bfloat16", flops, 0, 0, False), **changed)


def other(size: int, fused: int, is_fused: bool = False, phase: str = FORWARD) -> Operation:
    return Operation(0, phase, OTHER, "mul", "layers.*", "bfloat16", 0, size, fused, is_fused)


def sent(kind: str, payload: int, ranks: range = range(2), phase: str = FORWARD, **changed: Any) -> Operation:
    settings = {"axis": "dp_shard", "lane": f"{'gather' if kind == 'all-gather' else 'reduce'} dp_shard", **changed}
    message = Message(kind=kind, ranks=tuple(ranks), payload=payload, **settings)
    return Operation(0, phase, OTHER, kind, "", "", 0, 0, 0, False, (), message.lane, message)


def test_an_operation_takes_the_longer_one_of_computing_and_moving() -> None:
    speeds = Speeds(DEVICE)
    assert speeds.seconds(product(2_000_000_000, bytes=1_000_000)) == pytest.approx(2)
    assert speeds.seconds(product(2_000_000_000, bytes=3_000_000)) == pytest.approx(3)
    assert speeds.seconds(product(2_000_000_000, dtype="float32")) == pytest.approx(20)
    assert speeds.seconds(other(4_000_000, 1_000_000)) == pytest.approx(4)
    assert Speeds(DEVICE, compiled=True).seconds(other(4_000_000, 1_000_000)) == pytest.approx(1)
    # Eight bits: half of the time, and the operands are read twice and written.
    assert Speeds(DEVICE, fp8=True).seconds(product(2_000_000_000, bytes=1_000_000)) == pytest.approx(1 + 1.5)
    assert Speeds(DEVICE, fp8=True).seconds(product(2_000_000_000, module="lm_head")) == pytest.approx(2)
    # Of the numbers of a data sheet, a share is reached.
    sheet = Speeds(replace(DEVICE, measured=False))
    assert sheet.seconds(product(2_000_000_000)) == pytest.approx(2 / SHARES["products"])
    with pytest.raises(ConfigurationError, match="fp8 matrix products. There are: bf16"):
        Speeds(profile("a100-80gb"), fp8=True).seconds(product(1))


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        # In a node: three steps of 1 s, and three quarters of 8,000 bytes at 1,000 per second.
        ("all-gather", range(4), 0.5 + 3 + 6),
        ("reduce-scatter", range(4), 0.5 + 3 + 6),
        ("all-reduce", range(4), 0.5 + 6 + 12),
        ("broadcast", range(4), 0.5 + 1 + 8),
        # Two nodes of four: six steps inside and one between them; four ports of 100 bytes per second.
        ("all-gather", range(8), 0.5 + 6 + 10 + 7000 / 400),
        # One rank of each of four nodes: every step is one of the network, through one port.
        ("all-gather", range(0, 16, 4), 0.5 + 30 + 6000 / 100),
        ("activations", range(0, 8, 4), 0.5 + 10 + 8000 / 100),
        # Each rank sends 1,000 bytes to each other one: 4,000 to the other node, through its own port.
        ("all-to-all", range(8), 0.5 + 6 + 10 + 4000 / 100),
        ("all-to-all", range(4), 0.5 + 3 + 6),
    ],
)
def test_messages_take_the_steps_of_a_ring_and_their_bytes(kind, ranks, seconds) -> None:
    message = Message(kind, "axis", tuple(ranks), 8000, "lane")
    assert Speeds(DEVICE).message_seconds(message) == pytest.approx(seconds)


def test_ranks_of_several_nodes_need_a_network() -> None:
    message = Message("all-gather", "dp_shard", tuple(range(16)), 8000, "lane")
    unlinked = Speeds(replace(DEVICE, link_bandwidth=None))
    with pytest.raises(ConfigurationError, match="slow: its profile has no link_bandwidth, and 2 ranks are on 1 node"):
        unlinked.message_seconds(Message("all-reduce", "tp", (0, 1), 8, "lane"))
    apart = Message("all-gather", "tp", (0, 4), 8, "lane")  # a rank a node needs no links
    assert unlinked.message_seconds(apart) == Speeds(DEVICE).message_seconds(apart)
    with pytest.raises(ConfigurationError, match="l40s: its profile has no network_bandwidth"):
        Speeds(profile("l40s")).message_seconds(message)


def test_messages_overlap_with_computation_until_they_are_waited_for() -> None:
    """The gradients of 4,000 bytes take 2 s, next to 3 s of computation; those of 10,000 bytes take 2 s longer."""
    speeds = Speeds(FAST_LINKS)
    for payload, exposed in ((4000, 0.0), (10_000, 2.0)):
        waits = (("reduce dp_shard", 1),)
        step = [product(10**9), sent("reduce-scatter", payload), product(3 * 10**9), replace(other(0, 0), waits=waits)]
        found = simulate(((1, tuple(step)),), speeds)
        assert found.clock == pytest.approx(4 + exposed)
        assert found.parts[f"{EXPOSED}, dp_shard"] == pytest.approx(exposed)
        # What nothing waits for ends before the step does, too.
        assert simulate(((1, tuple(step[:2])),), speeds).clock == pytest.approx(1 + payload / 2000)
        # Without overlap, all of it is exposed.
        blocking = simulate(((1, tuple(step)),), Speeds(replace(FAST_LINKS, overlaps=False)))
        assert blocking.clock == pytest.approx(4 + payload / 2000)


def test_messages_of_asynchronous_tp_travel_beside_products() -> None:
    """In pieces: the longer one, and one of the two pieces of the shorter one, remain."""
    gather = sent("all-gather", 4000, axis="tp", lane="exchange tp")  # 2 s
    scatter = sent("reduce-scatter", 12_000, axis="tp", lane="exchange tp")  # 6 s
    arrived = (("exchange tp", 1),)
    waits = replace(other(0, 0), waits=arrived)
    step = [gather, waits, product(3 * 10**9), scatter, waits, product(10**9)]
    for speeds, exposed in ((Speeds(FAST_LINKS), 2 + 6), (Speeds(FAST_LINKS, overlaps_products=True), 1 + 3 + 1.5)):
        found = simulate(((1, tuple(step)),), speeds)
        assert found.clock == pytest.approx(4 + exposed)
        assert found.parts[f"{EXPOSED}, tp"] == pytest.approx(exposed)
        assert found.messages["tp"] == pytest.approx(8)
    overlapping = Speeds(FAST_LINKS, overlaps_products=True)
    # A product hides one message, and a message without a product beside it, or of another axis, is exposed.
    assert simulate(((1, (product(3 * 10**9), scatter, scatter)),), overlapping).clock == pytest.approx(3 + 4.5 + 6)
    assert simulate(((1, (gather, gather, waits)),), overlapping).clock == pytest.approx(2 + 2)
    blocking = Speeds(replace(FAST_LINKS, overlaps=False), overlaps_products=True)
    assert simulate(((1, tuple(step)),), blocking).clock == pytest.approx(4 + 8)
    data = [replace(item, message=replace(item.message, axis="dp_shard")) if item.message else item for item in step]
    assert simulate(((1, tuple(data)),), overlapping).clock == pytest.approx(4 + 8)


def test_ddp_reduces_gradients_in_buckets() -> None:
    """Of 1 MiB at first, and of 25 MiB or more: here five messages of gradients of 10 MiB are three."""
    device = replace(FAST_LINKS, message_seconds=100.0, link_bandwidth=1e12, overlaps=False)
    gradient = sent("all-reduce", 10 << 20, phase=BACKWARD, bucketed=True)
    waits = (("reduce dp_shard", 5),)
    step = (*[gradient] * 5, replace(other(0, 0, phase=STEP), waits=waits))
    found = simulate(((1, step),), Speeds(device))
    assert found.clock == pytest.approx(300, rel=1e-3)
    # What is left is sent before it is waited for, and at the end of a step without a wait.
    assert simulate(((1, step[:2]),), Speeds(device)).clock == pytest.approx(200, rel=1e-3)
    # On a device that computes meanwhile, a bucket leaves once its last gradient is ready.
    first = [replace(gradient, message=replace(gradient.message, payload=1 << 19)), product(10**9, phase=BACKWARD)]
    overlapping = simulate(((1, tuple(first * 2)),), Speeds(replace(device, overlaps=True)))
    assert overlapping.clock == pytest.approx(1 + 100, rel=1e-3)


def test_units_of_fsdp_take_time_where_nothing_overlaps() -> None:
    gather = replace(other(0, 0), name="fsdp::all_gather_copy_in", lane="gather")
    reduce = replace(other(0, 0), name="fsdp::chunk_cat")
    device = replace(DEVICE, unit_seconds=2.0, operation_seconds=0.5, overlaps=False)
    assert simulate(((1, (gather, reduce, other(0, 0))),), Speeds(device)).clock == pytest.approx(2 * 2.5 + 0.5)


def test_parameters_of_the_next_block_are_gathered_during_a_block() -> None:
    """Three blocks of 3 s, whose parameters take 2 s each: only the first gather is exposed."""
    waits = (("gather dp_shard", 1),)
    block = [sent("all-gather", 4000, early=True), product(3 * 10**9, waits=waits)]
    found = simulate(((1, tuple(block * 3)),), Speeds(FAST_LINKS))
    assert found.clock == pytest.approx(2 + 9)
    # Larger than the computation: a gather begins when the one before it was used, not earlier.
    block[0] = sent("all-gather", 10_000, early=True)
    assert simulate(((1, tuple(block * 3)),), Speeds(FAST_LINKS)).clock == pytest.approx(3 * 5 + 3)


def test_reduced_gradients_are_reduced_between_replicas_next() -> None:
    first = sent("reduce-scatter", 4000)
    second = sent("all-reduce", 1000, lane="reduce dp_replicate", after="reduce dp_shard")
    assert simulate(((1, (first, second)),), Speeds(FAST_LINKS)).clock == pytest.approx(2 + 1)


def test_the_device_waits_for_the_host() -> None:
    """Ten operations of 0.1 s that the host prepares in 1 s each; compiled, three of them are one."""
    speeds = Speeds(replace(DEVICE, operation_seconds=1.0))
    items = tuple(other(100_000, 100_000, is_fused=index % 3 > 0) for index in range(9))
    found = simulate(((1, items),), speeds)
    assert found.clock == pytest.approx(9 + 0.1) and found.parts[HOST] == pytest.approx(9 + 0.1 - 0.9)
    assert simulate(((1, items),), replace(speeds, compiled=True)).clock == pytest.approx(3 + 3 * 0.1)
    assert simulate(((1, items),), Speeds(replace(speeds.hardware, overlaps=False))).clock == pytest.approx(9 + 0.9)


def test_the_parts_of_a_step_sum_up_to_it() -> None:
    items = (product(6 * 10**9), product(10**9, phase=BACKWARD), other(10**6, 10**6, phase=STEP))
    found = step_time(((2, items),), Speeds(DEVICE), tokens=320, ranks=2, dtype="bf16", bubble=4.0)
    assert found.seconds == pytest.approx(2 * 8 + 4) and sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts[OPTIMIZER] == pytest.approx(2) and found.parts[BUBBLE] == 4
    assert found.tokens == pytest.approx(320 / 20 / 2)
    assert found.utilization == pytest.approx(3 * 2 * 6 / 20)
    assert found.bottleneck.startswith("Matrix products take 70% of the step")


def test_blocks_are_repeated() -> None:
    def step(blocks: int) -> Any:
        model = [product(10**9, block) for block in range(blocks)]
        backward = [product(2 * 10**9, block, BACKWARD) for block in reversed(range(blocks))]
        updates = [other(10**6, 10**6, phase=STEP) for _ in range(blocks)]
        return ((1, tuple(model + backward)), (1, tuple(updates)))

    found = more_operations(step(2), step(3), 3, 4)
    assert found is not None
    few, many = (simulate(passes, Speeds(DEVICE)) for passes in (found, step(7)))
    assert few.clock == pytest.approx(many.clock) == pytest.approx(7 * 3 + 7)
    assert few.parts == pytest.approx(dict(many.parts))
    different = ((1, (product(5), *step(3)[0][1])), step(3)[1])
    assert more_operations(step(2), different, 3, 4) is None


@pytest.mark.parametrize(("micro_batches", "stages"), [(4, 1), (8, 1), (8, 2), (16, 4)])
def test_the_bubble_of_equal_stages(micro_batches, stages) -> None:
    """(p - 1) / v passes of a micro batch; Narayanan et al., arXiv:2104.04473, section 2.2."""
    size, forward, backward = 4, 1.0, 2.0
    schedules = ("interleaved1f1b",) if stages > 1 else ("1f1b", "gpipe")
    for schedule in schedules:
        found = schedule_seconds(schedule, [forward] * size, [backward] * size, micro_batches, stages, 0.0)
        assert found == pytest.approx((micro_batches + (size - 1) / stages) * (forward + backward))


def test_a_slow_stage_sets_the_pace() -> None:
    found = schedule_seconds("1f1b", [1, 3, 1], [1, 3, 1], 10, 1, 0.0)
    assert found == pytest.approx(1 + 10 * 6 + 1)
    # Messages delay the first micro batch on its way there and back.
    assert schedule_seconds("gpipe", [1, 1], [1, 1], 1, 1, 0.25) == pytest.approx(4.5)


@pytest.mark.parametrize(("alone", "bubble"), [(1.0, 3.0), (1.5, 1.0), (2.0, 0.0), (4.0, 0.0)])
def test_ranks_that_share_processors_wait_less(alone: float, bubble: float) -> None:
    """Two stages of 1 and 2 s, and a micro batch: while one works, it has the processors of the other."""
    passes = ((1, (product(10**9), product(2 * 10**9, phase=BACKWARD))),)
    speeds = Speeds(replace(DEVICE, alone_speedup=alone))
    assert bubble_seconds((passes, passes), 0, "1f1b", 1, 1, speeds) == pytest.approx(bubble, abs=1e-6)


# -- plans -----------------------------------------------------------------------------------------------------------


FSDP2 = {"use_fsdp": "true", "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def planned(model: str, options: dict[str, str], **asked: Any) -> RankPlan:
    settings = load_settings({"num_processes": "2", **options}, environ={"HF_HOME": "nowhere"})
    request = {"batch_size": 2, "seq_length": 32, "hardware": profile("h100-sxm"), **asked}
    return make_plan(PlanRequest(settings, model, **request))


@needs_transformers
def test_the_flops_of_a_plan_are_those_of_the_model(tmp_path) -> None:
    """Six for each weight of a matrix and token, and attention; recomputation does not count."""
    model = write_llama(tmp_path)
    plan = planned(model, {**FSDP2, "fsdp_activation_checkpointing": "true", "mixed_precision": "bf16"})
    tokens, hidden, inner, keys, words, layers = 2 * 32, 64, 176, 32, 320, 3
    weights = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner) + hidden * words
    # Two products of each head, queries, half of the keys, and dimension.
    attention = 3 * layers * 2 * 2 * tokens * 32 // 2 * hidden
    assert plan.time is not None
    flops = plan.time.utilization * plan.time.seconds * 989e12
    assert flops == pytest.approx(6 * weights * tokens + attention)
    assert plan.time.tokens == pytest.approx(tokens / plan.time.seconds)
    text = as_text(plan)
    assert "time of a step on h100-sxm, eager (seconds):" in text and plan.time.bottleneck in text
    assert "Shares of the peak were fitted on h100-96gb, and are not compared with runs on h100-sxm." in text


@pytest.mark.slow  # traces a model of five blocks, and a pipeline
@needs_transformers
def test_the_time_of_few_blocks_is_that_of_all(tmp_path) -> None:
    model = write_llama(tmp_path, num_hidden_layers=6)
    mesh = {"use_parallelism_config": "true", "parallelism_config_pp_size": "2", "num_processes": "4"}
    for options, asked in (
        ({**FSDP2, "fsdp_activation_checkpointing": "true", "gradient_accumulation_steps": "3"}, {}),
        ({**mesh, "parallelism_config_tp_size": "2"}, {"num_microbatches": 2}),
    ):
        quick, whole = (planned(model, options, all_blocks=every, **asked).time for every in (False, True))
        assert quick is not None and whole is not None
        assert quick.seconds == pytest.approx(whole.seconds, rel=1e-3)
        assert quick.parts == pytest.approx(dict(whole.parts), rel=1e-2, abs=1e-5)
        assert (BUBBLE in quick.parts) == bool(asked)


@needs_transformers
def test_what_is_not_modelled_is_said_and_the_rest_given(tmp_path, capsys) -> None:
    file = tmp_path / "zero.yaml"
    file.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n")
    words = [str(file), "--model", write_llama(tmp_path / "m"), "--seq_length", "16", "--hardware", "h100-sxm"]
    assert COMMAND.run(words) == 0
    output = capsys.readouterr().out
    assert "time: that of a step of zero2 is not modelled." in output and "optimizer state" in output


def test_hardware_that_is_not_known(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    words = [str(file), "--model", "llama-3-8b", "--hardware"]
    with pytest.raises(ConfigurationError, match="'h100' is not a known device. There are: a100-80gb, b200"):
        COMMAND.run([*words, "h100"])
    broken = tmp_path / "broken.json"
    unknown = {**_fields(DEVICE), "curves": {}}
    for content in ({}, {"names": [], "flops": {}}, {**_fields(DEVICE), "memory_bandwidth": -1}, unknown):
        broken.write_text(json.dumps(content))
        with pytest.raises(ConfigurationError, match=r"broken\.json"):
            COMMAND.run([*words, str(broken)])


def _fields(device: HardwareProfile) -> dict[str, Any]:
    return {name: value for name, value in vars(device).items() if name != "key"}


@needs_transformers
def test_gradients_of_ddp_are_in_buckets_and_those_of_replicas_of_shards_are_not(tmp_path) -> None:
    model = write_llama(tmp_path)
    hybrid = {**FSDP2, "use_parallelism_config": "true", "parallelism_config_dp_replicate_size": "2"}
    hybrid |= {"parallelism_config_dp_shard_size": "2", "num_processes": "4"}
    for options, bucketed in (({}, True), (hybrid, False)):
        messages = [item.message for _, part in planned(model, options).operations for item in part if item.message]
        reduced = [item for item in messages if item.kind == "all-reduce" and item.payload > 1000]
        assert reduced and all(item.bucketed == bucketed for item in reduced)


@pytest.mark.parametrize(
    ("length", "share"),
    [(256, 1.0), (1024, 0.75), (2048, 0.625), (700, (64 * 8 * 512 + (700 - 512) * 700) / 700**2)],
)
def test_cpus_compute_whole_blocks_of_causal_attention(length: int, share: float) -> None:
    """Blocks of 512 keys: 256 tokens take as long as without a mask, as steps and single calls showed."""
    counted = []
    for on_cpu in (True, False):
        recorder = OperationRecorder({}, lambda storage: True, on_cpu)
        query = torch.empty(1, 2, length, 16, device="meta")
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        recorder.add(attention, (query, query, query, 0.0, True), {}, attention(query, query, query), (0, FORWARD, ""))
        (((_, (item,)),)) = recorder.result()
        counted.append(item.flops)
    assert counted[0] / counted[1] == pytest.approx(share / 0.5, rel=1e-3)


@needs_transformers
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_the_optimizer_moves_the_bytes_of_the_shards(tmp_path, optimizer: str) -> None:
    """Each value, its gradient and the averages are read, and all but the gradient written, at least once."""
    asked = {"optimizer": optimizer, "implementation": "for_loop"}
    plan = planned(write_llama(tmp_path, num_hidden_layers=1), {**FSDP2, "num_processes": "32"}, **asked)
    items = [item for times, part in plan.operations for item in part * times if item.phase == STEP]
    averages = {"adamw": 2, "sgd_momentum": 1}[optimizer]
    once = (3 + 2 * averages) * plan.memory.weights
    assert once <= sum(item.bytes for item in items) <= 4 * once


@needs_transformers
def test_what_selective_checkpointing_computes_again_is_found_with_cp(tmp_path) -> None:
    options = {**FSDP2, "use_parallelism_config": "true", "parallelism_config_cp_size": "2"}
    options |= {"fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_mode": "selective"}
    plan = planned(write_llama(tmp_path), options)
    assert plan.time is not None and plan.time.seconds > 0
    assert any(item.phase == RECOMPUTATION for _, part in plan.operations for item in part)
