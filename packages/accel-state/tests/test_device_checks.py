"""Whether this machine has a device, and what its torch can do."""

from __future__ import annotations

import inspect
import platform

import pytest
import torch

from accel_state import device_checks, devices
from accel_state.errors import ConfigurationError

CHECKS = {
    name: check
    for name, check in vars(device_checks).items()
    if name.startswith("is_") and check.__module__ == device_checks.__name__ and name != "is_torch_xpu_tensor"
}


def test_tensors_are_told_from_others():
    assert not device_checks.is_torch_xpu_tensor(torch.ones(1)) and not device_checks.is_torch_xpu_tensor("xpu")


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_answers(name):
    assert isinstance(CHECKS[name](), bool)
    assert inspect.getdoc(CHECKS[name])


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu", "npu", "mlu", "musa", "sdaa", "hpu"])
def test_device_checks_agree_with_the_devices(name):
    assert CHECKS[f"is_{name}_available"]() == devices.get(name).is_available()


@pytest.mark.parametrize("name", ["xpu", "npu", "mlu", "musa", "sdaa"])
def test_check_device_asks_for_one_at_least(name):
    assert CHECKS[f"is_{name}_available"](check_device=True) == (devices.get(name).device_count() > 0)


def test_mps_needs_the_version_asked_for():
    assert not device_checks.is_mps_available(min_version="999")
    assert device_checks.is_mps_available() == (platform.system() == "Darwin" and torch.backends.mps.is_available())


def test_xla_is_one_kind():
    with pytest.raises(ConfigurationError, match="check_is_tpu and check_is_gpu"):
        device_checks.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_types_of_this_machine():
    device = devices.detect()
    assert device_checks.is_bf16_available() == device.supports_autocast(torch.bfloat16)
    assert device_checks.is_fp16_available() == device.supports_autocast(torch.float16)


def test_torch_itself():
    assert device_checks.is_torch_distributed_available() == torch.distributed.is_available()
    assert device_checks.is_weights_only_available()
    assert device_checks.is_rocm_available() == (torch.version.hip is not None and torch.cuda.is_available())
