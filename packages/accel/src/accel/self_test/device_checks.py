"""What ``accel test --device NAME`` checks in addition: that the device does what accel's Device says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from accel_bigmodel import cpu_offload
from accel_state import devices
from accel_state.devices.base import Device
from accel_state.operations import send_to_device

from ..accelerator import Accelerator
from .checks import SelfTestError, check_checkpoint, expect_equal

ELEMENTS = 1 << 16


def device_of(accelerator: Accelerator) -> Device:
    """Return what accel knows about the device of this process."""
    return devices.get(accelerator.device.type)


def check_identity(accelerator: Accelerator) -> None:
    """Check that the process computes on its own device, which is the current one."""
    device = device_of(accelerator)
    expect_equal("the current device", device.current(), accelerator.device)
    made = torch.ones(1, device=accelerator.device.type)
    expect_equal("the device of a tensor without an index", made.device.type, accelerator.device.type)
    if accelerator.device.index is not None:
        expect_equal("the index of a tensor without an index", made.device.index, accelerator.device.index)


def check_memory(accelerator: Accelerator) -> None:
    """Tensors are counted, and an allocation beyond the memory raises an error that accel recognises."""
    device, index = device_of(accelerator), accelerator.device.index or 0
    total = device.memory_total(index)
    if not 0 < device.memory_free(index) <= total:
        raise SelfTestError(f"memory_free gives {device.memory_free(index)} bytes, of {total} in total")
    if device.name == "cpu" or not device.has_storage:
        return  # host memory is not counted by tensor, and is given to those who ask for too much
    before = device.memory_allocated(index)
    kept = torch.ones(ELEMENTS, device=accelerator.device)
    if device.memory_allocated(index) - before < kept.nbytes:
        raise SelfTestError(
            f"memory_allocated grew by {device.memory_allocated(index) - before} for {kept.nbytes} bytes"
        )
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=accelerator.device)
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise SelfTestError(
                f"{type(error).__name__} for an allocation of twice the memory is not recognised as out of memory. Add "
                f"a part of its message to out_of_memory_messages of the Device: {error}"
            ) from error
    else:
        raise SelfTestError(f"an allocation of {2 * total} bytes on a device with {total} did not fail")
    device.empty_cache()


def check_generators(accelerator: Accelerator) -> None:
    """Seeds and states of the device's generators decide what is drawn."""
    device = device_of(accelerator)

    def draw() -> list[float]:
        values: list[float] = torch.rand(4, device=accelerator.device).tolist()
        return values

    device.manual_seed_all(7)
    seeded, state, every = draw(), device.get_rng_state(), device.get_rng_state_all()
    following = draw()
    if following == seeded:
        raise SelfTestError("the generator of the device draws the same numbers again")
    device.manual_seed_all(7)
    expect_equal("numbers after the same seed", draw(), seeded)
    device.set_rng_state(state)
    expect_equal("numbers after set_rng_state", draw(), following)
    device.set_rng_state_all(every)
    expect_equal("numbers after set_rng_state_all", draw(), following)


def check_autocast(accelerator: Accelerator) -> None:
    """Matrix products are computed in the dtypes that the Device names."""
    device, layer = device_of(accelerator), nn.Linear(8, 8).to(accelerator.device)
    for dtype in filter(device.supports_autocast, device.autocast_dtypes):
        with torch.autocast(accelerator.device.type, dtype):
            expect_equal(
                "the dtype of a product under autocast",
                layer(torch.ones(2, 8, device=layer.weight.device)).dtype,
                dtype,
            )


def check_copies(accelerator: Accelerator) -> None:
    """Check that copies without waiting arrive in order with computation."""
    device = device_of(accelerator)
    for step in range(4):
        source = torch.full((ELEMENTS,), float(step))
        if device.name != "cpu" and torch.accelerator.is_available():
            source = source.pin_memory()
        sent = send_to_device({"x": source}, accelerator.device, non_blocking=True)["x"]
        doubled = (sent * 2).to("cpu", non_blocking=True)
        device.synchronize()
        expect_equal("what came back", doubled.unique()[:5].tolist(), [2.0 * step])  # some, for a message of one line


def check_offload(accelerator: Accelerator) -> None:
    """Check that a model with weights in host memory computes what it computes on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    inputs = torch.ones(2, 32, device=accelerator.device)
    with torch.no_grad():
        expected = model.to(accelerator.device)(inputs).tolist()
        offloaded = cpu_offload(model, accelerator.device)
        for _ in range(2):
            expect_equal("the output of the offloaded model", offloaded(inputs).tolist(), expected)


def check_background_save(accelerator: Accelerator) -> None:
    """Check that a checkpoint written while training continues contains the weights of its moment."""
    check_checkpoint(accelerator, blocking=False)


DEVICE_CHECKS: Mapping[str, Callable[[Accelerator], None]] = {
    "identity": check_identity,
    "memory": check_memory,
    "generators": check_generators,
    "autocast": check_autocast,
    "copies": check_copies,
    "offloaded model": check_offload,
    "background save": check_background_save,
}
