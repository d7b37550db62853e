"""compressed-tensors converts models from accelerate's offloading to its own, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from compressed_tensors.offload import (
    align_modules,
    disable_onloading,
    from_accelerate,
    load_offloaded_model,
    to_accelerate,
    update_offload_parameter,
)
from harness import Cases, files, weights
from safetensors.torch import save_file
from tiny_models import TOKENS, load, saved, spread
from transformers import AutoModelForCausalLM

cases = Cases()
X = torch.arange(8.0).view(2, 4) / 8
CONVERSIONS = (from_accelerate, to_accelerate, from_accelerate, to_accelerate)


class Parts(torch.nn.Module):
    """Layers, buffers, and a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.register_buffer("scale", torch.full((4,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


def parts() -> torch.nn.Module:
    torch.manual_seed(0)
    return Parts().eval()


def inner() -> torch.nn.Module:
    """The same below a root without values: compressed-tensors cannot name those of a root on the disk."""
    torch.manual_seed(0)
    return torch.nn.Sequential(Parts()).eval()


def dispatched(build: Callable[[], torch.nn.Module], folder: Path, names: dict[str, str]) -> Any:
    """From a safetensors file, with layers where the map says."""
    file = folder / "parts" / "model.safetensors"
    file.parent.mkdir()
    save_file(build().state_dict(), file, metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        model = build()
    return accelerate.load_checkpoint_and_dispatch(
        model.eval(), file.parent, device_map=names, offload_folder=folder / "disk", offload_buffers=True
    )


MIXED = {"first": "cpu", "norm": "cpu", "last": "disk", "scale": "cpu"}
PLACEMENTS: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: parts(),
    "hooks": lambda folder: accelerate.dispatch_model(parts(), {"": "cpu"}, force_hooks=True),
    "dispatched_cpu": lambda folder: dispatched(parts, folder, {"": "cpu"}),
    "dispatched_mixed": lambda folder: dispatched(parts, folder, MIXED),
    "dispatched_mixed_inner": lambda folder: dispatched(inner, folder, {f"0.{k}": v for k, v in MIXED.items()}),
    "dispatched_disk": lambda folder: dispatched(inner, folder, {f"0.{k}": "disk" for k in MIXED}),
    "cpu_offload": lambda folder: accelerate.cpu_offload(parts(), "cpu", offload_buffers=True),
    "cpu_offload_without_buffers": lambda folder: accelerate.cpu_offload(parts(), "cpu"),
    "cpu_offload_inner": lambda folder: accelerate.cpu_offload(inner(), "cpu", offload_buffers=True),
    "disk_offload_inner": lambda folder: accelerate.disk_offload(inner(), folder / "disk", "cpu", offload_buffers=True),
}


def add_conversion(name: str, place: Callable[[Path], Any]) -> None:
    @torch.no_grad()
    def case(folder: Path) -> Any:
        """Converted there and back twice, with a forward after each, and at the end everything is taken off."""
        model, expected = place(folder), parts()(X)
        outputs = [model(X)]
        states = []
        for convert in CONVERSIONS:
            convert(model)
            outputs.append(model(X))
            with disable_onloading():
                states.append({name: str(value.device) for name, value in model.state_dict().items()})
        hooks = sorted(name for name, module in model.named_modules() if hasattr(module, "_hf_hook"))
        accelerate.hooks.remove_hook_from_submodules(model)
        return {
            "outputs": outputs,
            "equal to the model in memory": [torch.equal(output, expected) for output in outputs],
            "states": states,
            "hooks": hooks,
            "on meta": sorted(name for name, value in model.state_dict().items() if value.is_meta),
        }

    cases.add(f"convert_{name}", case, (1,))


for _name, _place in PLACEMENTS.items():
    add_conversion(_name, _place)


def add_loaded(name: str, model: str, **options: Any) -> None:
    @torch.no_grad()
    def case(folder: Path) -> Any:
        """A model of Transformers, converted, changed, converted back and saved."""
        path = saved(folder, model)
        given = {key: value(path) if callable(value) else value for key, value in options.items()}
        with load_offloaded_model():
            loaded = AutoModelForCausalLM.from_pretrained(path, **given).eval()
        outputs = [loaded(TOKENS).logits]
        for module in loaded.modules():
            if isinstance(module, torch.nn.Linear):
                update_offload_parameter(module, "weight", module.weight * 0.5)
        outputs.append(loaded(TOKENS).logits)
        to_accelerate(loaded)
        loaded.save_pretrained(folder / "again")
        outputs.append(loaded(TOKENS).logits)
        from_accelerate(loaded)
        with align_modules(loaded.modules(), "cpu"):
            outputs.append(loaded(TOKENS).logits)
        again = load(folder / "again")
        return {
            "outputs": [*outputs, again(TOKENS).logits],
            "equal to the model in memory": [torch.equal(outputs[1], output) for output in outputs[2:]],
            "files": files(folder / "again"),
            "weights": weights(again.state_dict()),
        }

    cases.add(f"load_offloaded_{name}_{model}", case, (1,))


DISK = {"offload_folder": lambda path: str(path.parent / "offload")}
for _model in ("llama", "llama_tied", "gpt2", "mixtral"):
    add_loaded("plain", _model)
    add_loaded("cpu", _model, device_map={"": "cpu"})
    add_loaded("disk", _model, device_map={"": "disk"}, **DISK)
    add_loaded("alternate", _model, device_map=spread, **DISK)
    add_loaded("auto", _model, device_map="auto_offload", max_memory={"cpu": "150KB"}, **DISK)
