"""The shared states and what follows from a rank."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from accel_state import (
    AcceleratorState,
    ConfigurationError,
    DistributedType,
    GradientAccumulationPlugin,
    GradientState,
    PartialState,
    context,
)
from accel_state.env import patch_environment
from accel_state.state import do_nothing, is_initialized
from accel_state.testing import run_world


@pytest.fixture(autouse=True)
def fresh_states() -> Any:
    with context.isolated():
        yield


class Settings:
    """What the state shows of a DeepSpeed plugin."""

    deepspeed_config: dict[str, Any] = {"zero_optimization": {"stage": 2}}  # noqa: RUF012


def test_the_strategy_shows_in_the_words_of_the_state() -> None:
    state = AcceleratorState(cpu=True, mixed_precision="bf16")
    assert repr(state).startswith("Distributed environment: NO\n") and repr(state).endswith(
        "Mixed precision type: bf16\n"
    )
    state._distributed_type = DistributedType.DEEPSPEED
    state.deepspeed_plugins = Settings()
    assert repr(state).startswith("Distributed environment: DEEPSPEED\n") and "Device: cpu\n" in repr(state)
    assert repr(state).endswith("Mixed precision type: bf16\nds_config: {'zero_optimization': {'stage': 2}}\n")
    assert repr(PartialState()).startswith("Distributed environment: NO\n")


def test_instances_share_their_attributes() -> None:
    assert not is_initialized()
    first = PartialState(cpu=True)
    assert is_initialized() and PartialState._shared_state
    assert PartialState().__dict__ is first.__dict__ and PartialState().device == torch.device("cpu")
    assert (first.num_processes, first.process_index, first.local_process_index) == (1, 0, 0)
    assert first.distributed_type == DistributedType.NO == "NO" and first.backend is None and not first.use_distributed
    assert first.is_main_process and first.is_local_main_process and first.is_last_process
    assert "Num processes: 1" in repr(first)
    PartialState._reset_state()
    assert not is_initialized()
    second = PartialState(cpu=True)
    PartialState._shared_state = {}
    assert not is_initialized() and second.initialized and PartialState(cpu=True).__dict__ is PartialState._shared_state


def test_an_isolated_context_leaves_the_outer_one_alone() -> None:
    outer = PartialState(cpu=True)
    with context.isolated():
        assert not is_initialized()
        GradientState()._set_sync_gradients(False)
    assert is_initialized() and GradientState().sync_gradients and outer.initialized


def test_a_failed_start_leaves_no_half_state() -> None:
    with patch_environment(RANK="0", WORLD_SIZE="two"), pytest.raises(ConfigurationError, match="two"):
        PartialState(cpu=True)
    assert not is_initialized()


def test_precision_comes_from_the_argument_then_the_environment() -> None:
    with patch_environment(ACCELERATE_MIXED_PRECISION="bf16"):
        assert AcceleratorState(cpu=True).mixed_precision == "bf16"
        AcceleratorState._reset_state()
        assert AcceleratorState(mixed_precision="FP16", cpu=True).mixed_precision == "fp16"
    with pytest.raises(ConfigurationError, match="mixed_precision='no'.*'fp16'"):
        AcceleratorState(mixed_precision="no")
    assert AcceleratorState(mixed_precision="fp16").mixed_precision == "fp16"
    AcceleratorState._reset_state()
    with pytest.raises(ConfigurationError, match="'fp61'.*PrecisionType.*fp8, fp16, bf16"):
        AcceleratorState(mixed_precision="fp61", cpu=True)


def test_settings_are_entries_of_the_plugins() -> None:
    state = AcceleratorState(cpu=True)
    state.fsdp_plugin = settings = Settings()
    assert state.plugins == {"fsdp": settings} and state.fsdp_plugin is settings
    state.fsdp_plugin = None
    assert state.plugins == {} and state.fsdp_plugin is None


def test_debug_mode_comes_from_the_environment() -> None:
    with patch_environment(ACCELERATE_DEBUG_MODE="yes"):
        assert PartialState(cpu=True).debug


def test_a_wrong_option_that_it_does_not_need_leaves_it_usable() -> None:
    with patch_environment(ACCELERATE_MIXED_PRECISION="bf17", ACCELERATE_MULTI_GPU="perhaps"):
        assert PartialState(cpu=True).num_processes == 1


class Loader:
    """As much of a loader as the gradient state looks at."""

    def __init__(self, end: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end
        self.remainder = remainder


def test_the_loader_of_the_latest_batch_is_the_active_one() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False))
    assert (state.num_steps, state.sync_with_dataloader, state.adjust_scheduler, state.sync_each_batch) == (
        3,
        False,
        True,
        False,
    )
    assert not state.in_dataloader and not state.end_of_dataloader and state.remainder == -1
    train, evaluation = Loader(), Loader(end=True, remainder=5)
    state._add_dataloader(train)
    state.activate(train)
    state._add_dataloader(evaluation)
    assert state.active_dataloader is evaluation and state.end_of_dataloader and state.remainder == 5
    state.activate(train)  # interleaved: the batch now worked on is a training batch
    assert state.active_dataloader is train and not state.end_of_dataloader
    assert state.dataloader_references == [None, evaluation, train]
    state._remove_dataloader(train)
    assert state.active_dataloader is evaluation
    del evaluation
    gc.collect()
    assert state.active_dataloader is None and state.dataloader_references == [None]


def of_step(events: str) -> str:
    """The loaders of the current step after events: "a" yields a batch, "A" begins and yields, "-a" ends, "." uses."""
    state = GradientState()
    loaders = {name: Loader() for name in "abc"}
    for event in events.split():
        if event == ".":
            state.batch_used = True
        elif event.startswith("-"):
            state._remove_dataloader(loaders[event[1]])
        else:
            if event.isupper():
                state._add_dataloader(loaders[event.lower()])
            assert state.activate(loaders[event.lower()]) == (len(state.dataloader_references) > 2)
    names = {id(loader): name for name, loader in loaders.items()}
    return "".join(names[id(loader)] for loader in state.step_dataloaders)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("A", "a"),
        ("A A", "a"),  # it begins again before its end
        ("A . B", "b"),  # an evaluation within a step
        ("A B", "b"),  # or before it; the first step of a loop over both looks the same
        ("A B . a b", "ab"),
        ("A B . a b . a b", "ab"),
        ("A B a b", "ab"),  # batches of which none was used
        ("A B a b a b", "ab"),
        ("A B . a b b", "ab"),
        ("A B . a b . b", "b"),
        ("A B . a b . a -b B", "ab"),  # the second loader begins again
        ("A B . a b . a -b . B", "b"),
        ("A B . a b -b . a a B", "ab"),  # it was not open for some steps
        ("A B . a b -b . a . B", "b"),
        ("A B . a b . -b B -b B", "b"),  # its batch was not used
        ("A B . a b . b -b a B", "ab"),
        ("B C . b c . -b -c . A C", "c"),  # it was read with another loader before
        ("A B . a b . a b C", "c"),  # an evaluation before the step of two loaders
        ("A B C . a b c . b -c C", "bc"),  # one of three loaders begins again, in a step without the first
        ("A . B . -b", "a"),
        ("A B . a b . -a", "b"),
    ],
)
def test_loaders_of_a_step(events: str, expected: str) -> None:
    assert of_step(events) == expected


def test_accumulation_settings_are_checked() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigurationError, match="must be a positive integer"):
            GradientAccumulationPlugin(num_steps=wrong)  # type: ignore[arg-type]


def where_am_i() -> tuple[Any, ...]:
    state = PartialState()
    ran = []
    state.on_main_process(lambda: ran.append("main"))()
    state.on_last_process(lambda: ran.append("last"))()
    state.on_local_main_process(lambda: ran.append("local main"))()

    # A rank of NumPy's is one too; accel-state does not need NumPy.
    one: Any = importlib.import_module("numpy").int64(1) if find_spec("numpy") else 1

    @state.on_process(process_index=one)
    def documented() -> str:
        """Doc."""
        return "one"

    @state.on_local_process(local_process_index=0)
    def local() -> str:
        return "zero"

    assert documented.__doc__ == "Doc."
    for wrong in (None, 7):
        with pytest.raises(ValueError, match=f"process_index={wrong}"):
            state.on_process(print, process_index=wrong)
    return (
        ran,
        documented(),
        local(),
        state.process_index,
        state.distributed_type,
        state.backend,
        AcceleratorState().num_processes,
    )


def test_functions_run_on_the_chosen_process_only() -> None:
    assert run_world(where_am_i, 2) == [
        (["main", "local main"], None, "zero", 0, DistributedType.MULTI_CPU, "gloo", 2),
        (["last"], "one", None, 1, DistributedType.MULTI_CPU, "gloo", 2),
    ]
    assert do_nothing(1, a=2) is None


def go_in_order() -> tuple[float, float, bool]:
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(0.5)
        inside = time.monotonic()
    failed = False
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise KeyError("on the main process")
    except KeyError:
        failed = True
    state.wait_for_everyone()
    return inside, time.monotonic(), failed


def test_the_main_process_goes_first_and_never_leaves_the_others_waiting() -> None:
    (main, _, failed), (other, _, _) = run_world(go_in_order, 2)
    assert other >= main and failed


def adopt_a_group() -> tuple[int, int, str | None]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    return state.process_index, state.num_processes, state.backend


def test_a_process_group_that_runs_already_is_used() -> None:
    assert run_world(adopt_a_group, 2, state=False) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_processes_print_once_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    PartialState(cpu=True).print("hello", end="!")
    assert capsys.readouterr().out == "hello!"


@pytest.mark.slow  # starts four interpreters to meet a race; worlds end through the same code in every test
@pytest.mark.timeout(330)  # four processes that import torch, two at a time
def test_a_script_that_just_ends_ends_well() -> None:
    """gloo's threads race with the end of the interpreter; about one such run in five aborted when nothing closed the
    group.
    """
    from accel_state.ports import reserved_port

    script = textwrap.dedent("""
        import torch
        from accel_state import PartialState
        state = PartialState(cpu=True)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
        for _ in range(3):
            model(torch.ones(2, 10)).sum().backward()
    """)
    import os

    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        with reserved_port() as port:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", script],
                    env={**os.environ, **shared, "MASTER_PORT": str(port), "RANK": str(r), "LOCAL_RANK": str(r)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for r in range(2)
            ]
            errors = [rank.communicate(timeout=100)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors
