"""The peak of a step: compared with what torch's CPU allocator reports, and for more blocks than were traced."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_models import write_llama
from torch.profiler import ProfilerActivity, profile, record_function

from accel import Accelerator
from accel_launch.config.read import load_settings
from accel_plan import changes
from accel_plan import trace as tracing
from accel_plan.changes import changes_that_fit
from accel_plan.command import COMMAND
from accel_plan.memory import BACKWARD, CLIPPING, FORWARD, STEP, Event, Group, Moment, StepMemory
from accel_plan.models import build_model, model_config
from accel_plan.peak import more_blocks, peak_of
from accel_plan.plan import PlanRequest, RankPlan, make_plan
from accel_plan.report import as_text
from accel_plan.reserve import Reserve, reserve_of
from accel_plan.step import build_optimizer
from accel_state.errors import ConfigurationError
from accel_state.hardware import find_profile
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "max_position_embeddings": 512}
BATCH, LENGTH = 2, 256
FSDP2 = {"use_fsdp": "true", "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def folder_of(folder: Path, **changed: Any) -> str:
    return write_llama(folder, **{**SHAPE, "vocab_size": 1000, **changed})


def planned(model: str, options: dict[str, str], **asked: Any) -> RankPlan:
    settings = load_settings({"num_processes": "1", **options}, environ={"HF_HOME": "nowhere"})
    return make_plan(PlanRequest(settings, model, **{"batch_size": BATCH, "seq_length": LENGTH, **asked}))


def measured(model_folder: str, optimizer: str, implementation: str, options: dict[str, str]) -> int:
    """The largest sum of this process's allocations in the second of two steps."""
    import os

    os.environ.update(load_settings(options, environ={"HF_HOME": "nowhere"}).environment())
    accelerator = Accelerator(cpu=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model: Any = build_model(model_config(model_folder))
        model.to_empty(device="cpu")
        model.init_weights()
        model, prepared = accelerator.prepare(model, build_optimizer(optimizer, implementation, model.parameters()))
        gc.collect()
        tokens = torch.randint(1000, (BATCH, LENGTH))
        for step in range(2):
            with record_function(f"step {step}"):
                pass
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
    events = profiler.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == "step 1")
    total = peak = 0
    for when, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total) if when >= begin else 0
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return peak


@pytest.mark.parametrize(
    ("optimizer", "implementation", "changed", "phase", "options"),
    [
        pytest.param("adamw", "for_loop", {}, BACKWARD, {}, marks=pytest.mark.slow),
        ("adamw", "for_loop", {}, BACKWARD, {"activation_checkpointing": "true"}),
        # Few activations, so that the optimizer's temporaries are the peak: one copy of all parameters with foreach.
        ("adamw", "foreach", {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 3000}, STEP, {}),
        pytest.param("sgd_momentum", "foreach", {"vocab_size": 20_000}, BACKWARD, {}, marks=pytest.mark.slow),
    ],
)
def test_one_process_allocates_what_was_planned(tmp_path, optimizer, implementation, changed, phase, options) -> None:
    model = folder_of(tmp_path, **changed)
    plan = planned(model, {"cpu": "true", **options}, optimizer=optimizer, implementation=implementation)
    assert plan.peak is not None and plan.peak.moment.phase == phase
    found = run_world(measured, 1, model, optimizer, implementation, options, timeout=200)[0]
    assert plan.peak.total == pytest.approx(found, rel=0.01)
    assert sum(plan.peak.categories.values()) == plan.peak.total


def test_offloaded_activations_are_named_in_the_report(tmp_path) -> None:
    options = {"cpu": "true", "activation_checkpointing": "true", "activation_checkpointing_offload": "true"}
    model = folder_of(tmp_path, num_hidden_layers=1)
    offloaded = planned(model, options)
    assert "They are offloaded: it needs less." in as_text(offloaded)
    assert "They are off" not in as_text(replace(offloaded, offloads_activations=False))


CASES: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2, checkpointing": {**FSDP2, "fsdp_activation_checkpointing": "true"},
    "tp": {"use_parallelism_config": "true", "parallelism_config_tp_size": "2"},
}


# How much gloo's threads hold in the step depends on when they run: with tensor parallelism up to 7% more.
@pytest.mark.slow  # trains on two ranks; benchmarks/plan_memory.py has twenty configurations
@pytest.mark.parametrize("name", [*list(CASES)[:2], pytest.param("tp", marks=pytest.mark.timing)])
def test_two_ranks_allocate_what_was_planned(tmp_path, name) -> None:
    model, options = folder_of(tmp_path, vocab_size=8000), CASES[name]
    plan = planned(model, {**options, "num_processes": "2", "cpu": "true"}, implementation="for_loop")
    assert plan.peak is not None
    found = run_world(measured, 2, model, "adamw", "for_loop", options, timeout=250)
    # gloo's threads hold the tensors of their last collective for some time.
    assert plan.peak.total == pytest.approx(min(found), rel=0.05)


def test_parameters_of_which_some_are_sharded_are_updated_one_by_one(tmp_path) -> None:
    """As accel does it; torch's foreach does not mix the two."""
    model, options = folder_of(tmp_path, num_hidden_layers=1), {**CASES["tp"], "num_processes": "2"}
    assert [planned(model, {**FSDP2, "num_processes": "2"}).implementation] == ["foreach"]
    plan = planned(model, options)
    assert plan.implementation == "for_loop" and plan.peak is not None
    with pytest.raises(ConfigurationError, match="--optimizer_implementation foreach"):
        planned(model, options, implementation="foreach")


def test_the_loss_of_a_large_vocabulary_is_the_peak(tmp_path) -> None:
    """Log-softmax, its gradient, and the gradient of the logits: three times float32."""
    model = folder_of(tmp_path, vocab_size=20_000, num_hidden_layers=1)
    plan = planned(model, {**FSDP2, "mixed_precision": "bf16", "num_processes": "2"})
    assert plan.peak is not None
    largest = plan.peak.tensors[:3]
    assert {item.bytes for item in largest} == {4 * BATCH * LENGTH * 20_000}
    assert {item.group.operation for item in largest} == {
        "_log_softmax",
        "nll_loss_backward",
        "_log_softmax_backward_data",
    }
    assert "The peak is in the backward pass, at _log_softmax_backward_data." in as_text(plan)


def test_ddp_holds_gradients_twice(tmp_path) -> None:
    plan = planned(folder_of(tmp_path, num_hidden_layers=1), {"num_processes": "2"})
    assert plan.peak is not None and plan.peak.categories["gradient buffers"] == 4 * plan.parameters


def test_the_verdict_on_a_limit(tmp_path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    words = [str(file), "--model", folder_of(tmp_path, num_hidden_layers=1), "--seq_length", "16", "--memory", "1TiB"]
    assert COMMAND.run(words) == 0
    assert "fits in 1.0 TiB, with" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["plenty", "0GB", "-1GiB", "80"])
def test_a_limit_that_is_no_size(tmp_path, given) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(ConfigurationError, match=f"--memory {given}"):
        COMMAND.run([str(file), "--model", folder_of(tmp_path), f"--memory={given}"])


# -- more blocks than were traced ------------------------------------------------------------------------------------


def group(name: str, size: int) -> Group:
    return Group("activations", name, "layers.*", (size,), "int8", size)


def synthetic(blocks: int, last: int = 0) -> StepMemory:
    """A step of a model: each block keeps 10 bytes and needs 5, the last one ``last`` more; foreach takes all of it."""
    events = [Event(None, Moment(FORWARD, "", "embed"), group("embed", 3), 1)]

    def add(block: int | None, phase: str, name: str, size: int, count: int) -> None:
        events.append(Event(block, Moment(phase, name, name), group(name, size), count))

    for block in range(blocks):
        add(block, FORWARD, "keep", 10, 1)
        add(block, FORWARD, "need", 5 + (last if block == blocks - 1 else 0), 1)
        add(block, FORWARD, "need", 5 + (last if block == blocks - 1 else 0), -1)
    for block in reversed(range(blocks)):
        add(block, BACKWARD, "gradient", 7, 1)
        add(block, BACKWARD, "keep", 10, -1)
    add(None, CLIPPING, "norm", 1, 1)
    add(None, CLIPPING, "norm", 1, -1)
    for count in (1, -1):
        for _ in range(blocks):
            add(None, STEP, "root", 20, count)
    for _ in range(blocks):
        add(None, STEP, "gradient", 7, -1)
    add(None, STEP, "embed", 3, -1)
    return StepMemory({group("weight", 7): blocks}, tuple(events))


def test_the_block_in_the_middle_is_repeated() -> None:
    for blocks in (4, 9):
        found = more_blocks(synthetic(2, last=2), synthetic(3, last=2), 3, blocks - 3)
        assert found is not None
        assert peak_of(found) == peak_of(synthetic(blocks, last=2))
    assert peak_of(synthetic(9)).total == 9 * 7 + 3 + 9 * 7 + 9 * 20


def test_blocks_that_differ_are_not_repeated() -> None:
    """The last of three blocks is larger than the last of two."""
    assert more_blocks(synthetic(2), synthetic(3), 3, 5) is not None
    assert more_blocks(synthetic(2), synthetic(3, last=500), 3, 5) is None


def test_a_plan_of_few_blocks_equals_that_of_all(tmp_path, monkeypatch) -> None:
    model, traced = folder_of(tmp_path, num_hidden_layers=5), []
    original = tracing.trace

    def trace(task: tracing.TraceTask) -> Any:
        traced.append(task.config.num_hidden_layers)
        return original(task)

    monkeypatch.setattr(tracing, "trace", trace)
    options = {**FSDP2, "fsdp_activation_checkpointing": "true", "num_processes": "2"}
    quick, whole = (planned(model, options, all_blocks=every) for every in (False, True))
    assert quick.peak == whole.peak
    assert traced == [2, 3, 5], "blocks that are not repeated are all traced, which this does not compare"


@pytest.mark.parametrize(
    ("precision", "keys", "kept"), [("no", 2, BATCH * 4 * LENGTH**2 * 4), ("no", 4, 0), ("bf16", 2, 0)]
)
def test_gpus_keep_the_scores_of_float32_where_keys_have_fewer_heads(tmp_path, precision, keys, kept) -> None:
    """An H100 took 15.7 GiB for a step that was planned with 13.0 GiB when scores were not counted."""
    settings = [{"cpu": cpu, "mixed_precision": precision} for cpu in ("true", "false")]
    model = folder_of(tmp_path, num_attention_heads=4, num_key_value_heads=keys, num_hidden_layers=1)
    on_cpu, on_gpu = (planned(model, one, implementation="foreach").memory.activations for one in settings)
    assert kept <= on_gpu - on_cpu <= 1.25 * kept


# -- changes that make a plan fit ------------------------------------------------------------------------------------


def request_of(model: str, options: dict[str, str], **asked: Any) -> PlanRequest:
    return PlanRequest(load_settings(options, environ={"HF_HOME": "nowhere"}), model, seq_length=LENGTH, **asked)


@pytest.mark.slow  # traces six plans; the fast test below has stubs in their place
def test_each_of_the_changes_makes_the_plan_fit(tmp_path) -> None:
    model = folder_of(tmp_path, num_hidden_layers=1)
    options = {**FSDP2, "num_processes": "2"}
    request = request_of(model, options, batch_size=4)
    plan = make_plan(request)
    limit = plan.total - 1
    found = changes_that_fit(plan, replace(request, memory_limit=limit))
    assert found.fits and not found.together
    assert [change.description.split()[0] for change in found.changes] == ["--batch_size"] * 2 + [
        "fsdp_activation_checkpointing:"
    ]
    assert all(change.total <= limit for change in found.changes)
    # What is said of a change is what its plan says.
    halved = planned(model, {**options, "gradient_accumulation_steps": "2"}, batch_size=2)
    assert found.changes[0].total == halved.total


def test_a_part_of_the_device_is_left_free(tmp_path) -> None:
    model = folder_of(tmp_path, num_hidden_layers=1)
    device = replace(find_profile("h100-sxm"), context_bytes=1000, communicator_bytes=200, allocator_share=0.25)
    options = {**FSDP2, "num_processes": "2", "mixed_precision": "bf16"}
    plan = planned(model, options, hardware=device, batch_size=2)
    # One communicator of all ranks, and one of the axis.
    assert plan.reserve == Reserve(1000, 400, round(0.25 * plan.total))
    assert plan.needed == plan.as_dict()["needed"] == plan.total + 1400 + round(0.25 * plan.total)
    assert reserve_of(device, plan.collectives, 1, 1000) == Reserve(1000, 200, 250)
    assert reserve_of(device, (), 1, 1000) == Reserve(1000, 0, 250)
    limit = plan.needed
    text = as_text(replace(plan, memory_limit=limit)).splitlines()
    place = text.index("reserve on h100-sxm (bytes):")
    numbers = [int(line[24:46].replace(",", "")) for line in text[place + 1 : place + 5]]
    assert numbers == [1000, 400, plan.reserve.allocator, limit] and text[place + 6].endswith("with 0 bytes left")
    assert "does not fit" not in "".join(text)
    assert ": 1 bytes too much" in as_text(replace(plan, memory_limit=limit - 1))
    # A profile that says nothing of it, such as a file with the numbers of a data sheet.
    silent = replace(device, context_bytes=0, communicator_bytes=0, allocator_share=0.0)
    assert reserve_of(silent, plan.collectives, 2, plan.total) is None
    bare = replace(plan, reserve=None, memory_limit=plan.total)
    assert "with 0 bytes left for the device's context and allocator" in as_text(bare)


def test_a_limit_that_nothing_meets_and_one_that_a_change_meets(tmp_path, monkeypatch) -> None:
    """Of changes that take no less together with those before them, nothing is said."""
    request = request_of(
        folder_of(tmp_path, num_hidden_layers=1), {**FSDP2, "num_processes": "2"}, batch_size=2, memory_limit=1000
    )
    plan = make_plan(request)
    monkeypatch.setattr(
        changes, "make_plan", lambda changed: SimpleNamespace(peak=True, needed=5000 * changed.batch_size)
    )
    found = changes_that_fit(plan, request)
    assert "does not fit in 1000 bytes" in as_text(plan, found)
    assert not found.fits and found.together
    assert [(change.description.split(" and")[0], change.total) for change in found.changes] == [
        ("--optimizer_implementation fused", 10000),
        ("--batch_size 1", 5000),
    ]
    found = changes_that_fit(plan, replace(request, memory_limit=6000))
    assert found.fits and not found.together and {change.total for change in found.changes} == {5000}
    # A change helps that needs less than the peak and the reserve.
    between = plan.total + 1
    monkeypatch.setattr(changes, "make_plan", lambda _: SimpleNamespace(peak=True, needed=between))
    found = changes_that_fit(replace(plan, reserve=Reserve(0, 0, 2)), request)
    assert [change.total for change in found.changes] == [between]


def test_changes_are_proposed_where_only_the_peak_fits(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(changes, "_candidates", lambda *_: [])
    model, file = folder_of(tmp_path / "model", num_hidden_layers=1), tmp_path / "run.yaml"
    file.write_text("num_processes: 1\n")
    words = [str(file), "--model", model, "--seq_length", str(LENGTH), "--hardware", "h100-sxm"]
    # The context takes 512 MiB, and the tensors less than 28.
    assert COMMAND.run([*words, "--memory", "512MiB"]) == 0
    assert "No change of those that were tried makes it fit" in capsys.readouterr().out
    assert COMMAND.run([*words, "--memory", "540MiB"]) == 0
    assert "fits in 540.0 MiB, with " in capsys.readouterr().out
