"""The private names of torch that _torch_compat uses still exist and behave as expected."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_fp8 import _torch_compat
from accel_state import is_torch_version


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 multiplies 8-bit matrices on GPUs only")
def test_scaled_mm_multiplies_8_bit_matrices() -> None:
    ones, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.tensor(2.0)
    product = _torch_compat.scaled_mm(ones, ones.t(), scale_a=scale, scale_b=scale, out_dtype=torch.float32)
    assert (product == 64.0).all()


def test_foreach_operations_write_into_tensors() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    _torch_compat.foreach_copy_(tensors, [torch.ones(2), torch.ones(3)])
    _torch_compat.foreach_add_(tensors, 1)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    _torch_compat.foreach_zero_(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_registered_hooks_are_found() -> None:
    module, hook = nn.Linear(2, 2), lambda module, args: None
    module.register_forward_pre_hook(hook)
    assert list(_torch_compat.forward_pre_hooks(module).values()) == [hook]


def test_a_compiled_model_prefixes_its_names() -> None:
    names = torch.compile(nn.Linear(2, 2)).state_dict()
    assert all(name.startswith(_torch_compat.COMPILED_PREFIX) for name in names)


def test_ddp_reads_the_ignored_names() -> None:
    assert _torch_compat.DDP_IGNORED in inspect.getsource(DistributedDataParallel.__init__)


def test_torch_marks_functions_with_constant_results_in_the_same_way() -> None:
    expected, marked = (lambda: 1), (lambda: 1)
    torch.compiler.assume_constant_result(expected)
    assert vars(_torch_compat.constant_result(marked)) == vars(expected)


def test_moving_a_module_calls_apply() -> None:
    assert "recurse" in inspect.signature(nn.Module._apply).parameters
