"""The private names of torch that the package uses exist and mean what we think they mean."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from accel_bigmodel import _torch_compat as compat


def test_tables_of_a_module() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("table", torch.ones(1), persistent=False)
    assert compat.children_of(module)["0"] is module[0]
    assert compat.parameters_of(module[0])["weight"] is module[0].weight
    assert compat.buffers_of(module)["table"] is module.table
    assert compat.non_persistent_buffers(module) == {"table"}
    compat.parameters_of(module[0])["weight"] = replacement = nn.Parameter(torch.zeros(2))
    assert module[0].weight is replacement


@pytest.mark.slow  # imports torch's compiler in a new interpreter
def test_the_meta_device_leaves_no_half_imported_compiler() -> None:
    code = "from accel_bigmodel._torch_compat import on_meta\nwith on_meta(): import torch._dynamo"
    subprocess.run([sys.executable, "-c", code], check=True)
    with compat.on_meta():
        assert torch.ones(1).device.type == "meta"


def test_fake_tensors_and_storages() -> None:
    with compat.FakeTensorMode():
        tensor = torch.ones(2, 3)
    assert compat.storage_key(tensor) == compat.storage_key(tensor[0]) != compat.storage_key(torch.ones(1))


def test_what_changes_a_tensor_in_place_is_noticed() -> None:
    changes = [lambda one: one.add_(1), lambda one: one.t_(), lambda one: one.unsqueeze_(0)]
    changes += [lambda one: one.mul_(torch.ones(2, requires_grad=True)), lambda one: one.requires_grad_()]
    for mode in (compat.FakeTensorMode(), nullcontext()):
        with mode:
            for change in changes:
                tensor = torch.empty(2, 2)
                assert compat.is_untouched(tensor) and (tensor + 1).shape == (2, 2) and compat.is_untouched(tensor)
                change(tensor)
                assert not compat.is_untouched(tensor)


def test_conversions_pass_through_one_method() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    seen = []

    def noting(convert, recurse=True):
        seen.append(recurse)
        return compat.apply_to_tensors(module[0], convert, recurse)

    module[0].__dict__[compat.APPLY] = noting
    assert module.half()[0].weight.dtype is torch.float16 and module.to(torch.float64)[0].bias.dtype is torch.float64
    assert seen == [True, True]
