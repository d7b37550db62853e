"""Seeds and synchronized generators, on real ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state import devices
from accel_state.context import isolated
from accel_state.enums import RNGType
from accel_state.errors import ConfigurationError
from accel_state.random import set_seed, synchronize_rng_state, synchronize_rng_states
from accel_state.state import PartialState
from accel_state.testing import run_world

Draw = tuple[float, float, float]


def draw() -> Draw:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seeded_draw(seed: int, device_specific: bool) -> Draw:
    set_seed(seed, device_specific=device_specific)
    return draw()


KINDS = ("python", "numpy", "torch", "generator")


def synchronized_draws() -> dict[str, tuple[float, ...]]:
    """Draws after the ranks' generators were set apart and one of them, or all, were brought together."""
    found = {}
    for name, rng_types in [*((kind, [kind]) for kind in KINDS), ("all", list(KINDS))]:
        set_seed(100, device_specific=True)
        generator = torch.Generator().manual_seed(PartialState().process_index)
        synchronize_rng_states(rng_types, generator=generator)
        found[name] = (*draw(), float(torch.rand((), generator=generator)))
    return found


def rank_zero_is_not_disturbed(rng_types: list[str]) -> bool:
    set_seed(3, device_specific=True)
    before = draw()
    set_seed(3, device_specific=True)
    synchronize_rng_states(rng_types, generator=torch.Generator())
    return draw() == before


def unavailable_device() -> str:
    missing = next(name for name in ("cuda", "xpu") if not devices.get(name).is_available())
    with pytest.raises(ConfigurationError, match=f"no {missing} device") as caught:
        synchronize_rng_state(missing)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _fresh_state():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with isolated():
        yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_seed_reaches_every_generator(seed):
    set_seed(seed)
    expected = (random.Random(seed).random(), float(np.random.RandomState(seed).rand()))
    assert (random.random(), float(np.random.rand())) == expected
    assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40])
def test_a_seed_outside_the_range_is_an_error_and_changes_nothing(seed):
    set_seed(5)
    with pytest.raises(ConfigurationError, match=f"seed={seed} "):
        set_seed(seed)
    set_at_once = draw()
    set_seed(5)
    assert draw() == set_at_once


def test_a_seed_is_the_same_on_every_rank_unless_asked_otherwise():
    assert len(set(run_world(seeded_draw, 2, 42, False))) == 1
    specific = run_world(seeded_draw, 3, 42, True)
    for rank, drawn in enumerate(specific):
        set_seed(42 + rank)
        assert drawn == draw()


def test_the_reference_values_do_not_move():
    # What plain calls of the three libraries give.
    set_seed(42)
    drawn = draw()
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    assert drawn == draw()


def test_deterministic_kernels_are_asked_for():
    was = torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1)
        assert torch.are_deterministic_algorithms_enabled() == was
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(was)


def test_one_generator_is_synchronized_and_the_others_stay_apart():
    ranks = run_world(synchronized_draws, 2)
    for name in (*KINDS, "all"):
        for kind, values in zip(KINDS, zip(*(rank[name] for rank in ranks), strict=True), strict=True):
            assert len(set(values)) == (1 if name in (kind, "all") else 2), (name, kind)


def test_rank_zero_keeps_its_state():
    assert run_world(rank_zero_is_not_disturbed, 2, ["python", "numpy", "torch"])[0]


def test_one_process_keeps_its_state():
    assert rank_zero_is_not_disturbed([RNGType.TORCH, RNGType.NUMPY, RNGType.PYTHON])


def test_a_generator_must_be_given():
    for call in (
        lambda: synchronize_rng_state("generator"),
        lambda: synchronize_rng_state(),
        lambda: synchronize_rng_states(["generator"]),
    ):
        with pytest.raises(ConfigurationError, match="needs the generator"):
            call()


def test_an_unknown_generator_is_named():
    with pytest.raises(ConfigurationError, match="'dice' is not a RNGType"):
        synchronize_rng_state("dice")


def test_a_device_that_is_not_there_is_named():
    assert all("It has: " in message for message in run_world(unavailable_device, 2))
