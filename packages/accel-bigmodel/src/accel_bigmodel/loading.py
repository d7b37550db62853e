"""Loading checkpoints into models, tensor by tensor, each where it should be."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .checkpoint.checkpoint_mapping import Place, apart, check_match, match, places_of
from .checkpoint.files import CheckpointFile, checkpoint_files, open_file
from .checkpoint.safetensors_file import SafetensorsFile
from .device_map.device_map_checks import check_device_map
from .hooks.attach import align_hooks
from .offload.alignment import align_when_called, indifferent, is_aligned, is_product, settled
from .offload.store import offload_weight, save_offload_index
from .progress import progress
from .sizes import as_names
from .tensors import Location, as_device, as_dtype, set_module_tensor_to_device
from .tied_params import check_tied_parameters_on_same_device, location_of, with_shared_modules

_RECORD = "_accel_offloaded"


@dataclass
class OffloadRecord:
    """What of a model lies on the disk, from its loading until it is dispatched.

    Attributes:
        index: as :class:`OffloadedWeightsLoader` takes it.
        files: the opened files that it names.
        folder: where weights that had to be written are.
    """

    index: dict[str, Any] = field(default_factory=dict)
    files: dict[str, SafetensorsFile] = field(default_factory=dict)
    folder: Path | None = None


def offload_record(model: nn.Module) -> OffloadRecord | None:
    """What loading has left on the disk of a model."""
    return model.__dict__.get(_RECORD)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Location] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one file, by name. Tensors for the CPU are mapped from the file rather than read.

    Args:
        checkpoint_file: a safetensors file, or one of ``torch.save``; code in it is never run.
        device_map: where each goes, by the name of its module or its own. What goes to the disk comes to the CPU. None:
            the CPU.

    Raises:
        ConfigurationError: a file that is not whole, or holds anything but tensors by name.
    """
    file = open_file(Path(checkpoint_file))
    loaded = file.tensors(file.names())
    if device_map is None:
        return loaded
    for name, value in loaded.items():
        location = location_of(name, device_map)
        if location is not None and location != "disk":
            loaded[name] = value.to(as_device(location))
    return loaded


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Location] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each weight directly to its device.

    Weights for the CPU are mapped from safetensors files, not copied; as long as they live, such a file must not be
    written in place (replacing it by a renamed one is fine). Weights for the disk stay in their safetensors files, and
    are written to ``offload_folder`` only where the file has another format or, given a folder, another type. Names,
    shapes and the device map are checked before anything is changed. To run a model with weights on the disk call
    :func:`dispatch_model` next.

    Args:
        model: the model; on the meta device, or with values, which are replaced.
        checkpoint: a file, an index of shards, a folder with one of them, or a repository of the Hub.
        device_map: where modules go. None: weights stay on their devices; those on the meta device come to the CPU.
        offload_folder: where weights are written that cannot be read where they are.
        dtype: the type of all floating point weights. None: the types that the model has.
        offload_state_dict: accepted for callers that spare memory in this way; weights never pass through memory as a
            whole here.
        offload_buffers: buffers of modules on the disk stay there too.
        keep_in_fp32_modules: parts of names; weights of such modules get float32 instead of ``dtype``.
        offload_8bit_bnb: quantized weights of modules on the CPU or the disk are offloaded as they are in the
            checkpoint.
        strict: refuse missing or unexpected names even if every tensor has values without them.
        full_state_dict: for sharded models and no device map: the checkpoint holds whole tensors.
        broadcast_from_rank0: for sharded models and no device map: only rank 0 reads, and sends each rank its shards.

    Raises:
        ConfigurationError: no such checkpoint or a damaged one; names or shapes that do not fit, all of them listed; a
            device map that leaves something out; weights for the disk that must be written, and no ``offload_folder``;
            a model that is dispatched with offloaded weights.
    """
    if any(hook.offload for module in model.modules() for hook in align_hooks(module)):
        raise ConfigurationError(
            f"{type(model).__name__} has offloaded weights, which a forward would put back over what is loaded: call "
            "remove_hook_from_submodules(model) first, or load_checkpoint_and_dispatch, which dispatches it anew"
        )
    if device_map is None and (broadcast_from_rank0 or not full_state_dict or _is_sharded(model)):
        from .checkpoint.sharded_loading import load_into_sharded_model

        load_into_sharded_model(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    if device_map is not None:
        check_device_map(model, device_map)
        device_map = with_shared_modules(model, device_map)
    targets = _Targets(device_map, dtype, as_names(keep_in_fp32_modules), offload_buffers)
    loading = _Loading(model, targets, None if offload_folder is None else Path(offload_folder), offload_8bit_bnb)
    loading.open(os.fspath(checkpoint), strict)
    loading.run()


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@dataclass
class _Targets:
    """Where each tensor goes, and in which type."""

    device_map: Mapping[str, Location] | None
    dtype: str | torch.dtype | None
    keep_in_fp32: Sequence[str]
    offload_buffers: bool

    def location(self, place: Place) -> Location:
        """A device or "disk"."""
        if self.device_map is None:
            return place.tensor.device if place.tensor.device.type != "meta" else "cpu"
        found = location_of(place.name, self.device_map)
        assert found is not None
        if found == "disk" and place.is_buffer and not self.offload_buffers:
            return "cpu"
        return found

    def type_of(self, place: Place, stored: torch.dtype) -> torch.dtype:
        """The type that the values get."""
        own = place.tensor.dtype
        if not (stored.is_floating_point or stored.is_complex) or not (own.is_floating_point or own.is_complex):
            return stored
        if self.dtype is None:
            return own
        if any(f"{part}." in place.name or place.name.endswith(part) for part in self.keep_in_fp32):
            return torch.float32
        return as_dtype(self.dtype)


class _Loading:
    """One loading of one checkpoint."""

    def __init__(self, model: nn.Module, targets: _Targets, folder: Path | None, quantized: bool) -> None:
        self.model = model
        self.targets = targets
        self.folder = folder
        self.quantized = quantized
        self.record = OffloadRecord(folder=folder)
        self.places, self.lost_buffers = places_of(model)

    def open(self, checkpoint: str, strict: bool) -> None:
        """Open all files, and refuse what does not fit."""
        self.files = [(open_file(path), names) for path, names in checkpoint_files(checkpoint).items()]
        self.file_of: dict[str, CheckpointFile] = {}
        for file, names in self.files:
            self._check_index(file, names)
            self.file_of.update(dict.fromkeys(file.names() if names is None else names, file))
        shapes = {name: file.shape(name) for name, file in self.file_of.items()}
        found = match(self.places, shapes, self.lost_buffers)
        check_match(self.model, checkpoint, found, strict)
        self.sources = found.sources
        self._divide()
        self._check_folder()

    def _divide(self) -> None:
        """A shared weight that goes to several locations becomes one weight at each of them, with the same values."""
        device_map = self.targets.device_map
        if device_map is None:
            return
        places, divided = apart(self.places, lambda name: location_of(name, device_map))
        check_tied_parameters_on_same_device(divided, device_map)
        source_of = {name: self.sources.get(place.name) for place in self.places for name in place.names}
        self.sources = {place.name: source for place in places if (source := source_of[place.name]) is not None}
        self.places = places

    def _check_index(self, file: CheckpointFile, names: list[str] | None) -> None:
        held = set(file.names())
        absent = [name for name in names or [] if name not in held]
        if absent:
            raise ConfigurationError(
                f"{file.path} does not hold what its index says: {absent[:5]}. Download or save it again."
            )

    def _check_folder(self) -> None:
        if self.folder is not None:
            return
        unreadable = [
            source
            for place in self.places
            if (source := self.sources.get(place.name))
            and self.targets.location(place) == "disk"
            and not self.file_of[source].in_place
        ]
        if unreadable:
            raise ConfigurationError(
                f"{len(unreadable)} weights for the disk are in {self.file_of[unreadable[0]].path.name}, which is not "
                "a safetensors file: "
                "give offload_folder=, where they are written, or save the checkpoint as safetensors"
            )

    def run(self) -> None:
        """Load everything."""
        of_file: dict[int, list[Place]] = {}
        for place in self.places:
            source = self.sources.get(place.name)
            if source is not None:
                of_file.setdefault(id(self.file_of[source]), []).append(place)
        for file, _ in progress(self.files, "Loading weights"):
            self._load_file(file, of_file.get(id(file), []))
        if self.record.index:
            written = {name: entry for name, entry in self.record.index.items() if "safetensors_file" not in entry}
            if written and self.folder is not None:
                save_offload_index(written, self.folder)
            self.model.__dict__[_RECORD] = self.record

    def _load_file(self, file: CheckpointFile, places: list[Place]) -> None:
        resident = []
        for place in places:
            if self.targets.location(place) == "disk":
                self._leave_on_disk(file, place)
            else:
                resident.append(place)
        tensors = file.tensors({self.sources[place.name] for place in resident})
        for place in resident:
            self._put(file, place, tensors[self.sources[place.name]])

    def _leave_on_disk(self, file: CheckpointFile, place: Place) -> None:
        source = self.sources[place.name]
        stored = file.dtype(source)
        wanted = self.targets.type_of(place, stored)
        if isinstance(file, SafetensorsFile) and (wanted == stored or self.folder is None):
            entry: dict[str, Any] = {
                "safetensors_file": str(file.path),
                "weight_name": source,
                "dtype": str(wanted).removeprefix("torch."),
            }
            self.record.files[str(file.path)] = file
        else:
            assert self.folder is not None
            self.folder.mkdir(parents=True, exist_ok=True)
            value = file.tensors([source])[source].to(wanted)
            entry = offload_weight(value, place.name, self.folder)[place.name]
            entry["file"] = place.name
        # A shared weight is there once; all its names lead to it.
        self.record.index.update(dict.fromkeys(place.names, entry))
        if place.tensor.device.type != "meta" or place.tensor.dtype != wanted:
            self._empty(place, wanted)

    def _empty(self, place: Place, dtype: torch.dtype) -> None:
        old = place.tensor
        if not (place.is_buffer or type(old) is nn.Parameter):
            owner, key = place.slots[0]
            set_module_tensor_to_device(owner, key, "meta")
            return
        empty = torch.empty(old.shape, dtype=dtype, device="meta")
        place.put(empty if place.is_buffer else nn.Parameter(empty, requires_grad=old.requires_grad))

    def _put(self, file: CheckpointFile, place: Place, value: torch.Tensor) -> None:
        old, device = place.tensor, as_device(self.targets.location(place))
        wanted = self.targets.type_of(place, value.dtype)
        if type(old) not in {nn.Parameter, torch.Tensor}:
            self._put_special(file, place, value, device)
        elif self.targets.device_map is None and old.device.type != "meta" and wanted == old.dtype:
            with torch.no_grad():
                old.copy_(value)  # an optimizer may hold it
        else:
            moved = settled(value.to(device=device, dtype=wanted))
            place.put(
                moved
                if place.is_buffer
                else nn.Parameter(moved, requires_grad=old.requires_grad and wanted.is_floating_point)
            )
            for owner, _ in place.slots if not is_aligned(moved) else ():
                if is_product(owner) or not indifferent(owner, wanted):
                    align_when_called(owner)

    def _put_special(self, file: CheckpointFile, place: Place, value: torch.Tensor, device: torch.device) -> None:
        source = self.sources[place.name]
        scales = source.removesuffix("weight") + "SCB"
        statistics = (
            self.file_of[scales].tensors([scales])[scales]
            if source.endswith("weight") and scales in self.file_of
            else None
        )
        owner, key = place.slots[0]
        dtype = value.dtype if statistics is not None else self.targets.dtype
        set_module_tensor_to_device(owner, key, device, value=value, dtype=dtype, fp16_statistics=statistics)
        for other, name in place.slots[1:]:
            other._parameters[name] = owner._parameters[key]


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Bring weights of a folder into a model, on the CPU.

    Args:
        model: the model.
        index: the entries of the weights to bring; nothing is done where there are none.
        offload_folder: a folder that :func:`offload_state_dict` wrote to.
    """
    from .offload.store import load_offloaded_weight

    for name, info in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", info)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def on_meta(model: nn.Module, without: Iterable[str] = ()) -> list[str]:
    """Names of tensors that have no values, but for those given."""
    known = set(without)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, tensor in tensors if tensor.device.type == "meta" and name not in known]
