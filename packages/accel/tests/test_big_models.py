"""Dispatched and offloaded models in the Accelerator: prepared where they lie, saved whole."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel import Accelerator, cpu_offload, init_empty_weights, load_checkpoint_and_dispatch
from accel.utils.modeling import is_peft_model
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)))


def checkpoint(folder) -> tuple[Net, str]:
    torch.manual_seed(0)
    model = Net()
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "outer.weight"}
    save_file(state, folder / "in.safetensors")
    return model, str(folder / "in.safetensors")


def offloaded(file: str, device_map: dict) -> Net:
    with init_empty_weights():
        model = Net()
    return load_checkpoint_and_dispatch(model, file, device_map=device_map)


@pytest.mark.parametrize(
    "device_map", [{"": "disk"}, {"inner": "cpu", "outer": "cpu"}, {"inner": "disk", "outer": "disk"}]
)
def test_a_dispatched_model_is_prepared_and_saved(device_map: dict, tmp_path) -> None:
    plain, file = checkpoint(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(offloaded(file, device_map))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert set(accelerator.get_state_dict(model)) == set(plain.state_dict())
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        accelerator.save_model(model, tmp_path / "out", safe_serialization=safe)
        again = Net()
        saved = load_file(tmp_path / "out" / name) if safe else torch.load(tmp_path / "out" / name, weights_only=True)
        again.load_state_dict(saved, strict=not safe)
        assert torch.equal(again(x), plain(x))
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 3, "a shared weight is saved once"
    assert torch.equal(accelerator.unwrap_model(model)(x), plain(x))


def test_saving_over_the_checkpoint_that_is_in_use(tmp_path) -> None:
    plain, _ = checkpoint(tmp_path)
    (tmp_path / "in.safetensors").rename(tmp_path / "model.safetensors")
    model = offloaded(str(tmp_path), {"": "disk"})
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x)) and torch.equal(offloaded(str(tmp_path), {"": "disk"})(x), plain(x))


def test_a_model_offloaded_to_memory_is_saved(tmp_path) -> None:
    plain, _ = checkpoint(tmp_path)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(cpu_offload(plain), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["inner.weight"], weights["inner.weight"])


def spread_on_two(folder: str) -> tuple[str, float]:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError) as caught:
        accelerator.prepare(offloaded(folder, {"": "disk"}))
    model = accelerator.prepare_model(offloaded(folder, {"": "disk"}), evaluation_mode=True)
    return str(caught.value), model(torch.ones(1, 4)).sum().item()


def test_a_dispatched_model_is_not_trained_by_several_processes(tmp_path) -> None:
    plain, file = checkpoint(tmp_path)
    for message, output in run_world(spread_on_two, 2, file):
        assert (
            "Net was dispatched over several devices or offloaded" in message and "each of the 2 processes" in message
        )
        assert output == plain(torch.ones(1, 4)).sum().item()


def test_models_of_peft_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_peft_model(Net())
    import sys
    import types

    monkeypatch.setitem(sys.modules, "peft", types.SimpleNamespace(PeftModel=Net))
    assert is_peft_model(Net()) and not is_peft_model(nn.Linear(1, 1))
