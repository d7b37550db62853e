"""Retrying with smaller batches, and letting go of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state.errors import ConfigurationError
from accel_state.memory import clear_device_cache, find_executable_batch_size, release_memory, should_reduce_batch_size


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> Iterator[None]:
    """Each failed attempt collects garbage; what other tests left in this process need not be looked at again."""
    gc.freeze()
    yield
    gc.unfreeze()


OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity)"),
    RuntimeError("HIP out of memory. Tried to allocate"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
    RuntimeError("MPS backend out of memory (MPS allocated: 18.07 GB)"),
    RuntimeError("XPU out of memory. Tried to allocate"),
    RuntimeError("NPU out of memory. Tried to allocate"),
    RuntimeError("CPU out of memory."),
    RuntimeError("some other device is out of memory"),
    MemoryError("Unable to allocate 8.00 EiB for an array"),
]
OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("CUDA out of memory"),
    KeyError("batch"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory_is_recognised(error):
    assert should_reduce_batch_size(error)
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 12:
            raise error
        return "done"

    assert train() == "done"
    assert tried == [16, 14, 12]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_every_other_exception_goes_through_as_it_is(error):
    assert not should_reduce_batch_size(error)
    tried = []

    @find_executable_batch_size
    def train(batch_size):
        tried.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert tried == [128]


def test_the_host_really_runs_out():
    @find_executable_batch_size(starting_batch_size=2**60, reduce_batch_size_fn=lambda batch_size: batch_size >> 38)
    def allocate(batch_size, dtype):
        return torch.empty(batch_size, dtype=dtype).nbytes

    assert allocate(torch.float32) == 4 * 2**22


@settings(max_examples=8, deadline=None)
@given(start=st.integers(1, 24), fits=st.integers(1, 24))
def test_the_reduction_finds_the_first_that_fits(start, fits):
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size):
        if batch_size > fits:
            raise MemoryError
        return batch_size

    expected = start
    while expected > fits:
        expected = expected * 9 // 10
    assert train() == expected
    assert train() == expected


def test_a_later_call_starts_from_what_worked():
    tried = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 103:
            raise MemoryError
        return batch_size

    assert (train(), train()) == (103, 103)
    assert tried == [128, 115, 103, 103]


def test_nothing_fits():
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        raise RuntimeError("CUDA out of memory. Tried to allocate 7 GiB")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="zero.*from 4 down.*at.*size 1: .*7 GiB"):
            train()


def test_own_reduction_with_and_without_parameter():
    def minus_three(batch_size):
        return batch_size - 3

    sizes = iter([7, 5, 2])
    for reduce, expected in ((minus_three, [10, 7, 4]), (lambda: next(sizes), [10, 7, 5, 2])):
        tried = []

        @find_executable_batch_size(starting_batch_size=10, reduce_batch_size_fn=reduce)
        def train(batch_size, tried=tried):
            tried.append(batch_size)
            if batch_size > 4:
                raise MemoryError
            return batch_size

        train()
        assert tried == expected


def test_a_reduction_that_does_not_reduce_is_an_error():
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 8)
    def train(batch_size):
        raise MemoryError

    with pytest.raises(ConfigurationError, match="returned 8 after 8"):
        train()


def test_arguments_and_results_go_through():
    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size, first, *rest, key=None):
        """What it does."""
        return batch_size, first, rest, key

    assert train(1, 2, 3, key="k") == (8, 1, (2, 3), "k")
    assert train.__name__ == "train"
    assert train.__doc__ == "What it does."


def test_a_method_can_be_decorated_around_its_object():
    class Trainer:
        def run(self):
            return find_executable_batch_size(self._run, starting_batch_size=4)()

        def _run(self, batch_size):
            return batch_size

    assert Trainer().run() == 4


def test_passing_the_batch_size_is_explained():
    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size, model):
        return model

    with pytest.raises(TypeError, match=r"train\('model'\)"):
        train(128, "model")
    with pytest.raises(TypeError, match="called.*multiple.*'batch_size'"):
        train("model", batch_size=8)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        train()


def test_a_function_without_a_parameter_is_refused_at_once():
    with pytest.raises(TypeError, match=r"size.*Declare.*train\(batch_size, \.\.\.\)"):

        @find_executable_batch_size
        def train():
            return None


def test_a_type_error_of_the_users_own_code_goes_through():
    @find_executable_batch_size
    def train(batch_size):
        return batch_size + "x"

    with pytest.raises(TypeError, match="unsupported operand"):
        train()


def test_a_failed_attempt_is_let_go_before_the_next():
    attempts: list[weakref.ref] = []

    class Model:
        """Something that can be watched; a tensor is held by it as by a module."""

        def __init__(self):
            self.cycle = self

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        assert all(attempt() is None for attempt in attempts)
        model = Model()
        attempts.append(weakref.ref(model))
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory")

    gc.disable()
    try:
        train()
    finally:
        gc.enable()
    assert len(attempts) == 7


def test_release_memory():
    class Holder:
        def __init__(self):
            self.cycle = self

    first, second = Holder(), Holder()
    watched = weakref.ref(first), weakref.ref(second)
    gc.disable()
    try:
        first, second = release_memory(first, second)
        assert (first, second) == (None, None)
        # The caller's names were overwritten only after the call; the next collection takes the objects.
        clear_device_cache(garbage_collection=True)
    finally:
        gc.enable()
    assert [reference() for reference in watched] == [None, None]
    assert release_memory() == []
