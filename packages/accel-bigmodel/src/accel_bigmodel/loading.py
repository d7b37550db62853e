"""Loading checkpoints into models, each tensor directly to its device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_state import is_initialized
from accel_state.errors import ConfigurationError, check_type
from accel_state.paths import as_path

from ._torch_compat import parameters_of
from .checkpoint.checkpoint_mapping import ModelTensor, check_match, match_checkpoint, model_tensors, split_by_location
from .checkpoint.files import checkpoint_files
from .checkpoint.safetensors_file import SafetensorsFile
from .checkpoint.tensor_files import CheckpointFile, open_file
from .checkpoint.transformers_conversion import ConvertedFile, conversion_of, is_transformers_model
from .device_map.device_map_checks import check_device_map, check_devices
from .hooks.attach import has_offloaded_weights
from .offload.store import load_offloaded_weight, offload_weight, save_offload_index
from .placeholder import has_values
from .sizes import as_names
from .tensors import Location, are_whole_numbers, as_device, as_dtype, set_module_tensor_to_device
from .tied_params import check_tied_parameters_on_same_device, location_of, with_shared_modules

_RECORD = "_accel_offloaded"


@dataclass
class OffloadRecord:
    """The weights that loading left on the disk, kept on the model until it is dispatched."""

    index: dict[str, Any] = field(default_factory=dict)  # as for :class:`OffloadedWeightsLoader`
    files: dict[str, SafetensorsFile] = field(default_factory=dict)  # the open files that it names
    directory: Path | None = None  # the directory of weights that had to be written


def offload_record(model: nn.Module) -> OffloadRecord | None:
    """Return the record of the weights of a model that loading left on the disk."""
    return model.__dict__.get(_RECORD)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Location] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one file by name. Tensors for the CPU are mapped from the file instead of read.

    Args:
        checkpoint_file: a safetensors file, or one of ``torch.save``; code in it is never run.
        device_map: the device of each tensor, by its name or that of its module; "disk" means the CPU. None: the CPU.

    Raises:
        ConfigurationError: a truncated file, or one that holds anything but tensors by name.
    """
    file = open_file(Path(checkpoint_file))
    tensors = file.tensors(file.names())
    for name, value in tensors.items() if device_map is not None else ():
        location = location_of(name, device_map or {})
        if location is not None and location != "disk":
            tensors[name] = value.to(as_device(location))
    return tensors


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

    Weights for the CPU are mapped from safetensors files and used where they are in the mapping; while the model lives
    such a file must not be overwritten in place (renaming another file over it is safe). Weights for the disk stay in
    their safetensors files; they are written to ``offload_folder`` only if the file has another format (all of the
    weights of a .bin file that are mapped to the disk) or, given a directory, another dtype. Names, shapes and the
    device map are checked before anything is changed. To run a model with weights on the disk call
    :func:`dispatch_model` next.

    Args:
        model: the model; on the meta device, or with values, which are replaced.
        checkpoint: a file, an index of shards, a directory with one of them, a URL of any of these in object storage
            (``s3://bucket/model.safetensors``), or a Hub repository.
        device_map: devices of modules by name. None: weights stay on their devices, meta tensors go to the CPU.
        offload_folder: the directory for weights that cannot be read in place.
        dtype: the dtype of all floating point parameters and buffers, as in ``model.to(dtype)``; models of
            Transformers keep the dtypes of those that are not in the checkpoint. None: those of the model.
        offload_state_dict: ignored; accepted for compatibility. No full state dict is held in memory.
        offload_buffers: leave buffers of modules on the disk there too.
        keep_in_fp32_modules: parts of names; weights of such modules get float32 instead of ``dtype``.
        offload_8bit_bnb: ignored; accepted for compatibility. Quantized weights are offloaded as they are stored.
        strict: refuse missing or unexpected names even if every tensor has values without them.
        full_state_dict: for sharded models and no device map: the checkpoint holds full tensors.
        broadcast_from_rank0: for sharded models and no device map: only rank 0 reads, and sends each rank its shards.

    Raises:
        CheckpointMismatchError: names or shapes that do not fit, all of them listed; a ConfigurationError and a
            RuntimeError.
        ConfigurationError: checkpoint not found or damaged; an incomplete device map; weights that must be written to
            the disk, and no ``offload_folder``; a dispatched model with offloaded weights.
    """
    check_type(model, nn.Module, "load_checkpoint_in_model", "Pass a model: a torch.nn.Module.")
    if has_offloaded_weights(model):
        raise ConfigurationError(
            f"{type(model).__name__} has offloaded weights, and its next forward would restore them: call "
            "remove_hook_from_submodules(model) first, or load_checkpoint_and_dispatch, which dispatches it again"
        )
    # Importing it takes longer than mapping the model; without it no parameter can be sharded.
    tensor_module = sys.modules.get("torch.distributed.tensor")

    is_sharded = tensor_module is not None and any(
        isinstance(parameter, tensor_module.DTensor) for parameter in model.parameters()
    )
    if device_map is None and (broadcast_from_rank0 or not full_state_dict or is_sharded):
        load_into_sharded_model(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    if device_map is not None:
        check_device_map(model, device_map)
        check_devices(device_map)
        device_map = with_shared_modules(model, device_map)
    check_type(checkpoint, (str, os.PathLike), "checkpoint", "Give a file, a directory, or a Hub repository.")
    directory = None if offload_folder is None else as_path("offload_folder", offload_folder)
    loader = _CheckpointLoader(model, device_map, directory, dtype, as_names(keep_in_fp32_modules), offload_buffers)
    loader.open(os.fspath(checkpoint), strict)
    loader.load()


@dataclass
class _CheckpointLoader:
    model: nn.Module
    device_map: Mapping[str, Location] | None
    directory: Path | None
    dtype: str | torch.dtype | None
    keep_in_fp32: Sequence[str]
    offload_buffers: bool

    def __post_init__(self) -> None:
        self.record = OffloadRecord(directory=self.directory)
        self.file_of: dict[str, CheckpointFile | ConvertedFile] = {}

    def open(self, checkpoint: str, strict: bool) -> None:
        """Open all files, and refuse a checkpoint that does not fit."""
        self.files: list[CheckpointFile | ConvertedFile] = []
        stored_files: dict[str, CheckpointFile] = {}
        for path, names in checkpoint_files(checkpoint).items():
            file = open_file(path)
            stored = set(file.names())
            absent = [name for name in names or () if name not in stored]
            if absent:
                raise ConfigurationError(
                    f"{path} lacks tensors that its index lists: {absent[:5]}. Download or save it again."
                )
            self.files.append(file)
            stored_files.update(dict.fromkeys(file.names() if names is None else names, file))
        stored_names = {name: name for name in stored_files}  # by the name in the model
        conversion = conversion_of(self.model, stored_files)
        self.file_of.update(stored_files if conversion is None else conversion.files)
        if conversion is not None:
            self.files += conversion.converted
            stored_names = conversion.stored_names
        tensors, unsaved_buffers = model_tensors(self.model)
        shapes = {name: file.shape(stored_names.get(name, name)) for name, file in self.file_of.items()}
        match = match_checkpoint(tensors, shapes, unsaved_buffers)
        check_match(self.model, checkpoint, match, strict)
        source_of = {name: match.sources.get(tensor.name) for tensor in tensors for name in tensor.names}
        if self.device_map is not None:
            device_map = self.device_map
            tensors, untied = split_by_location(tensors, lambda name: location_of(name, device_map))
            check_tied_parameters_on_same_device(untied, device_map)
        named = [(tensor, source) for tensor in tensors if (source := source_of[tensor.name]) is not None]
        self.sources = [(tensor, stored_names.get(source, source)) for tensor, source in named]
        self.file_of.update({stored: self.file_of[name] for name, stored in stored_names.items()})
        if self.directory is None:
            self._check_readable_in_place()

    def _check_readable_in_place(self) -> None:
        on_disk = [
            (self.file_of[source], source) for tensor, source in self.sources if self._location(tensor) == "disk"
        ]
        for file, source in on_disk:
            if isinstance(file, ConvertedFile) and file.expert_stack(source) is None:
                raise ConfigurationError(
                    f"{source} is mapped to the disk, and Transformers stores it in another form than "
                    f"{type(self.model).__name__} has: give offload_folder=, where it is written, or map it elsewhere"
                )
        unreadable = [file.path.name for file, _ in on_disk if not (file.in_place or isinstance(file, ConvertedFile))]
        if unreadable:
            raise ConfigurationError(
                f"{len(unreadable)} weights mapped to the disk are in {unreadable[0]}, which is not a safetensors "
                "file: give offload_folder=, where they are written, or save the checkpoint as safetensors"
            )

    def _location(self, tensor: ModelTensor) -> Location:
        if self.device_map is None:
            return tensor.tensor.device if tensor.tensor.device.type != "meta" else "cpu"
        location = location_of(tensor.name, self.device_map)
        assert location is not None
        return "cpu" if location == "disk" and tensor.is_buffer and not self.offload_buffers else location

    def _dtype_for(self, tensor: ModelTensor, stored: torch.dtype) -> torch.dtype:
        present = tensor.tensor.dtype
        if not all(dtype.is_floating_point or dtype.is_complex for dtype in (stored, present)):
            return present if are_whole_numbers(stored, tensor.tensor) else stored
        if self.dtype is None:
            return present
        if any(f"{part}." in tensor.name or tensor.name.endswith(part) for part in self.keep_in_fp32):
            return torch.float32
        return present if present.is_complex else as_dtype(self.dtype)

    def load(self) -> None:
        """Load everything, file by file."""
        tensors_of: dict[int, list[tuple[ModelTensor, str]]] = {}
        for tensor, source in self.sources:
            tensors_of.setdefault(id(self.file_of[source]), []).append((tensor, source))
        total = sum(tensor.tensor.nbytes for tensor, _ in self.sources)
        with progress_bar("Loading weights", total=total, unit="B", unit_scale=True) as bar:
            for file in self.files:
                self._load_file(file, tensors_of.get(id(file), []), bar)
        if self.dtype is not None and not is_transformers_model(self.model):
            self._convert_the_rest()
        if self.record.index:
            in_place = {"safetensors_file", "stack"}
            written = {name: entry for name, entry in self.record.index.items() if not in_place & entry.keys()}
            if self.directory is not None:
                # Also where nothing is written: clients (compressed-tensors) put files of their own there.
                self.directory.mkdir(parents=True, exist_ok=True)
                save_offload_index(written, self.directory)
            self.model.__dict__[_RECORD] = self.record

    def _convert_the_rest(self) -> None:
        """Give ``dtype`` to parameters and buffers that are not in the checkpoint, as ``model.to(dtype)`` would.

        Models of Transformers decide that themselves: rotary frequencies, for example, must stay in float32.
        """
        loaded = {name for tensor, _ in self.sources for name in tensor.names}
        for tensor in model_tensors(self.model, with_unsaved=True)[0]:
            dtype = self._dtype_for(tensor, tensor.tensor.dtype)
            plain = type(tensor.tensor) in {nn.Parameter, torch.Tensor}
            if loaded.intersection(tensor.names) or dtype == tensor.tensor.dtype or not plain:
                continue
            value = tensor.tensor.detach().to(dtype)
            requires_grad = tensor.tensor.requires_grad
            tensor.replace(value if tensor.is_buffer else nn.Parameter(value, requires_grad=requires_grad))

    def _load_file(
        self, file: CheckpointFile | ConvertedFile, tensors: Sequence[tuple[ModelTensor, str]], bar: Any
    ) -> None:
        resident = []
        for tensor, source in tensors:
            if self._location(tensor) == "disk":
                self._leave_on_disk(file, tensor, source)
                bar.update(tensor.tensor.nbytes)
            else:
                resident.append((tensor, source))
        values = file.tensors({source for _, source in resident})
        for tensor, source in resident:
            self._put(tensor, source, values[source])
            bar.update(tensor.tensor.nbytes)

    def _leave_on_disk(self, file: CheckpointFile | ConvertedFile, tensor: ModelTensor, source: str) -> None:
        stored = file.dtype(source)
        dtype = self._dtype_for(tensor, stored)
        dtype_name = str(dtype).removeprefix("torch.")
        stays = dtype == stored or self.directory is None
        stack = file.expert_stack(source) if isinstance(file, ConvertedFile) else None
        if isinstance(file, SafetensorsFile) and stays:
            entry: dict[str, Any] = {"safetensors_file": str(file.path), "weight_name": source, "dtype": dtype_name}
            self.record.files[str(file.path)] = file
        elif stack is not None and stays:
            entry = {"stack": stack, "dtype": dtype_name}
        else:
            assert self.directory is not None
            self.directory.mkdir(parents=True, exist_ok=True)
            entry = offload_weight(file.tensors([source])[source].to(dtype), tensor.name, self.directory)[tensor.name]
            entry["file"] = tensor.name
        # A tied weight is stored once; all its names refer to it.
        self.record.index.update(dict.fromkeys(tensor.names, entry))
        old = tensor.tensor
        if old.device.type == "meta" and old.dtype == dtype:
            return
        if not (tensor.is_buffer or type(old) is nn.Parameter):
            owner, key = tensor.slots[0]
            set_module_tensor_to_device(owner, key, "meta")
        else:
            empty = torch.empty(old.shape, dtype=dtype, device="meta")
            tensor.replace(empty if tensor.is_buffer else nn.Parameter(empty, requires_grad=old.requires_grad))

    def _put(self, tensor: ModelTensor, source: str, value: torch.Tensor) -> None:
        old, device = tensor.tensor, as_device(self._location(tensor))
        dtype = self._dtype_for(tensor, value.dtype)
        if type(old) not in {nn.Parameter, torch.Tensor}:
            self._put_quantized(tensor, source, value, device)
        elif self.device_map is None and old.device.type != "meta" and dtype == old.dtype:
            with torch.no_grad():
                old.copy_(value)  # an optimizer may refer to it
        else:
            moved = value.to(device=device, dtype=dtype)
            requires_grad = old.requires_grad and dtype.is_floating_point
            tensor.replace(moved if tensor.is_buffer else nn.Parameter(moved, requires_grad=requires_grad))

    def _put_quantized(self, tensor: ModelTensor, source: str, value: torch.Tensor, device: torch.device) -> None:
        scales = source.removesuffix("weight") + "SCB"
        statistics, dtype = None, self.dtype
        if source.endswith("weight") and scales in self.file_of:
            statistics, dtype = self.file_of[scales].tensors([scales])[scales], value.dtype
        owner, key = tensor.slots[0]
        set_module_tensor_to_device(owner, key, device, value=value, dtype=dtype, fp16_statistics=statistics)
        for other, name in tensor.slots[1:]:
            parameters_of(other)[name] = parameters_of(owner)[key]


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load weights from a directory into a model, on the CPU.

    Args:
        index: the entries of the weights to load; None or empty loads nothing.
        offload_folder: a directory written by :func:`offload_state_dict`.
    """
    for name, info in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", info)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def on_meta(model: nn.Module, without: Iterable[str] = ()) -> list[str]:
    """Return the names of the tensors on the meta device, except those given."""
    known = set(without)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, tensor in tensors if not has_values(tensor) and name not in known]


def load_into_sharded_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load each rank's shards; every rank calls this. Arguments as in :func:`load_checkpoint_in_model`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    if not broadcast_from_rank0 or dist.get_rank() == 0:
        for path, names in checkpoint_files(checkpoint).items():
            file = open_file(path)
            state.update(file.tensors(file.names() if names is None else names))
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    with torch.no_grad():
        set_model_state_dict(model, state, options=options)


# Seconds; shorter loads show no bar.
_BAR_DELAY = 1.0


class _NoBar:
    """What :func:`progress_bar` returns where none is shown."""

    def __init__(self, iterable: Iterable[Any] = ()) -> None:
        self._items = iterable

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def update(self, count: int) -> None:
        """Show nothing."""


def progress_bar(description: str, **options: Any) -> Any:
    """Return a bar of tqdm, which huggingface_hub requires, shown after a second if the output is a terminal.

    It is shown on each node's main process. ``options`` are those of tqdm, which is imported only then.
    """
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    # Constructing a state could start process groups, so only an existing one is asked.
    if is_shown and is_initialized():
        from accel_state import PartialState

        is_shown = PartialState().is_local_main_process
    if not is_shown:
        return _NoBar(options.get("iterable", ()))
    from tqdm import tqdm

    return tqdm(desc=description, delay=_BAR_DELAY, leave=False, **options)
