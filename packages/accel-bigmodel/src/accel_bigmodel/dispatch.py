"""Running a model whose weights are on several devices, in host memory, and on the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from accel_state import devices
from accel_state.errors import ConfigurationError, check_type
from accel_state.humanize import counted
from accel_state.paths import as_path

from ._torch_compat import uncompiled
from .device_map.device_map_checks import check_device_map, check_devices
from .device_map.infer import infer_auto_device_map
from .device_map.memory import HOST_AND_DISK, MaxMemory, get_balanced_memory, get_max_memory
from .hooks.align import AlignDevicesHook
from .hooks.attach import (
    align_hooks,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_prefetcher,
    forget_offload,
    has_offloaded_weights,
    return_outputs_to_inputs,
)
from .hooks.base import add_hook_to_module, check_conversions, remove_hook_from_submodules
from .hooks.experts import largest_visit
from .hooks.state_dicts import accept_state_dicts
from .loading import OffloadRecord, load_checkpoint_in_model, offload_record, on_meta
from .offload.store import (
    OFFLOAD_INDEX_NAME,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    offload_state_dict,
)
from .placeholder import Placeholder, has_values
from .sizes import compute_module_sizes, direct_members, named_tensors, visiting_module
from .tensors import Location, TiedParamsMap, as_device, set_module_tensor_to_device
from .tied_params import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    location_of,
    retie_parameters,
    with_shared_modules,
)

Model = TypeVar("Model", bound=nn.Module)

NAMED_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: Model,
    execution_device: Location | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> Model:
    """Keep all weights of a model in host memory; each module gets its own for the duration of its forward.

    Args:
        execution_device: where the model runs. None: the device of its first parameter.
        offload_buffers: offload buffers too.
        state_dict: the weights. None: those of the model.
        preload_module_classes: classes whose modules get the weights of all their submodules at once, fetched ahead
            together. Any module may read the weights of others without it.
    """
    check_type(model, nn.Module, "cpu_offload", "Pass a model: a torch.nn.Module.")
    inner = uncompiled(model)
    if state_dict is None:
        # One copy of a tied weight, so that what is written into it under one name is seen under the others.
        tensors = inner.state_dict(keep_vars=True)
        copies = {id(value): value.detach().to("cpu") for value in tensors.values()}
        state_dict = {name: copies[id(value)] for name, value in tensors.items()}
    is_loader = isinstance(state_dict, OffloadedWeightsLoader)
    weights = state_dict if is_loader else OffloadedWeightsLoader(state_dict=state_dict)
    _offload_all(inner, execution_device, weights, offload_buffers, preload_module_classes)
    return model


def disk_offload(
    model: Model,
    offload_dir: str | os.PathLike[str],
    execution_device: Location | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> Model:
    """Keep all weights of a model in a directory; each module gets its own for the duration of its forward.

    Args:
        offload_dir: the directory. Weights that it holds already (see :func:`offload_state_dict`) are used; otherwise
            those of the model are written.
        execution_device: where the model runs. None: the device of its first parameter.
        offload_buffers: offload buffers too.

    Raises:
        ConfigurationError: the directory holds weights that are not those of this model.
    """
    check_type(model, nn.Module, "disk_offload", "Pass a model: a torch.nn.Module.")
    inner = uncompiled(model)
    if not (as_path("offload_dir", offload_dir) / OFFLOAD_INDEX_NAME).is_file():
        offload_state_dict(offload_dir, inner.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    for name, tensor in inner.state_dict().items():
        if not offload_buffers and name not in parameters:
            continue
        found = weights.index.get(name)
        shape = tuple(tensor.shape)
        # Entries for tensors of safetensors files have no shape.
        if found is None or tuple(found.get("shape", shape)) != shape:
            how = "is not among them" if found is None else f"has shape {tuple(found['shape'])} there, {shape} here"
            raise ConfigurationError(
                f"{offload_dir} holds the weights of another model: {name} {how}. Give another directory, or delete "
                "this one."
            )
    _offload_all(inner, execution_device, weights, offload_buffers, preload_module_classes)
    return model


def _offload_all(
    model: nn.Module,
    execution_device: Location | None,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> None:
    if execution_device is None:
        first = next(model.parameters())
        # A placeholder's weight is where its module runs.
        execution_device = (first.stands_for.read() if isinstance(first, Placeholder) else first).device
    forget_offload(model)
    classes = preload_module_classes
    attach_align_device_hook(
        model, execution_device, True, weights, offload_buffers=offload_buffers, preload_module_classes=classes
    )
    return_outputs_to_inputs(model)
    _complete_offload(model)


def _complete_offload(model: nn.Module, room: int | None = None) -> None:
    """Let a model whose modules have their hooks prefetch weights, and follow or refuse changes from outside."""
    attach_prefetcher(model, room)
    check_conversions(model)
    accept_state_dicts(model)
    for hook in align_hooks(model):
        hook.known_modules = sum(1 for _ in model.modules())


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Location],
    main_device: Location | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    max_memory: MaxMemory | None = None,
) -> Model:
    """Distribute a model over devices, and attach hooks that move inputs and offloaded weights to where they run.
    Modules mapped to an accelerator stay there. Those mapped to "disk", and to "cpu" if there are accelerators, are
    copied to the main device for each forward; the next ones are fetched meanwhile.

    Args:
        model: the model, with values or on the meta device.
        device_map: devices of modules by name: a number, a torch device, "cpu" or "disk".
        main_device: where offloaded modules run. None: the first accelerator of the map, else the CPU. Modules with a
            layer that is larger than this device run on the CPU.
        state_dict: weights of the modules on the CPU. None: those of the model.
        offload_dir: the directory of weights on the disk; missing ones are written.
        offload_index: index of the weights on the disk, as for :class:`OffloadedWeightsLoader`.
        offload_buffers: offload buffers with their modules instead of keeping them on the main device.
        skip_keys: names of keyword arguments, or of items of outputs, that are not moved between devices.
        preload_module_classes: classes whose modules get the weights of all their submodules at once, fetched ahead
            together. Any module may read the weights of others without it.
        force_hooks: attach hooks even if all modules are on one device.
        max_memory: as in :func:`get_max_memory`. What the limit of the main device leaves is the room for offloaded
            weights: those in use, those fetched ahead and, on the CPU, files that stay mapped between forwards. None:
            twice the largest module, and no files stay mapped.

    Returns:
        The model, with the map as ``hf_device_map``.

    Raises:
        ConfigurationError: a map that is incomplete or names unknown devices; weights for the disk without
            ``offload_dir`` and ``offload_index``; tensors without values.

    Examples:
        >>> model = dispatch_model(
        ...     model, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir="offload"
        ... )
        >>> model(torch.ones(1, 64)).shape
        torch.Size([1, 10])
    """
    check_type(model, nn.Module, "dispatch_model", "Pass a model: a torch.nn.Module.")
    hint = "Pass a dictionary of module names to devices, such as infer_auto_device_map(model) returns."
    check_type(device_map, Mapping, "dispatch_model(device_map=...)", hint)
    inner = uncompiled(model)
    if inner is not model:
        device_map = {name.removeprefix("_orig_mod").removeprefix("."): place for name, place in device_map.items()}
    check_device_map(inner, device_map)
    check_devices(device_map)
    _undo_dispatch(inner)
    whole_classes = tuple(preload_module_classes or ())
    flat_map = disjoint_device_map(inner, with_shared_modules(inner, device_map))
    dispatcher = _Dispatcher(inner, flat_map, main_device, offload_buffers, offload_dir, offload_index)
    dispatcher.keep_too_large_on_host(max_memory, whole_classes)
    is_split = len({str(location) for location in flat_map.values()}) > 1
    if force_hooks or is_split or any(dispatcher.offload.values()):
        dispatcher.find_offloaded_weights(state_dict)
        dispatcher.attach_hooks(skip_keys, whole_classes, dispatcher.room(max_memory))
    else:
        dispatcher.read_weights()
        dispatcher.refuse_empty(())
        tied = find_tied_parameters(inner)
        inner.to(as_device(next(iter(device_map.values()))))
        retie_parameters(inner, tied)
    inner.__dict__["hf_device_map"] = dict(device_map)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) and hasattr(inner, "get_encoder"):
        # Otherwise transformers' generate adds another library's hook to the encoder of a model with a device map.
        get_encoder: Any = inner.get_encoder
        encoder = get_encoder()
        if not hasattr(encoder, "_hf_hook"):
            add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))
    return model


def _undo_dispatch(model: nn.Module) -> None:
    if model.__dict__.pop("hf_device_map", None) is not None:
        remove_hook_from_submodules(model)
    elif has_offloaded_weights(model):
        forget_offload(model)


class _Dispatcher:
    """Dispatches one model by a map without nested entries."""

    def __init__(
        self,
        model: nn.Module,
        device_map: dict[str, Location],
        main: Location | None,
        offload_buffers: bool,
        offload_dir: str | os.PathLike[str] | None,
        offload_index: Mapping[str, Any] | None,
    ) -> None:
        self.model = model
        self.device_map = device_map
        self.offload_buffers = offload_buffers
        record = (offload_record(model) if offload_index is None else None) or OffloadRecord()
        self.files = record.files
        self.directory = Path(offload_dir) if offload_dir is not None else record.directory
        self.index: dict[str, Any] = {**record.index, **(offload_index or {})}  # of weights in files
        accelerators = [location for location in device_map.values() if str(location) not in HOST_AND_DISK]
        if main is None:
            main = accelerators[0] if accelerators else "cpu"
        self.main = main
        offloaded = {"disk"} if as_device(main).type == "cpu" else set(HOST_AND_DISK)
        self.offload = {name: str(location) in offloaded for name, location in device_map.items()}
        self.execution = {
            name: main if str(location) in HOST_AND_DISK else location for name, location in device_map.items()
        }
        self.weights: OffloadedWeightsLoader | None = None

    def keep_too_large_on_host(self, max_memory: MaxMemory | None, whole_classes: Collection[str]) -> None:
        """Let the CPU run offloaded modules with a layer that is larger than the main device."""
        main = as_device(self.main)
        if main.type == "cpu" or not any(self.offload.values()):
            return
        limit = devices.get(main.type).memory_total(main.index or 0)
        if max_memory is not None:
            limit = min(limit, get_max_memory(dict(max_memory)).get(main.index or 0, limit))
        sizes = compute_module_sizes(self.model)
        large = [name for name, offloads in self.offload.items() if offloads and sizes.get(name, 0) > limit]
        for name in large:
            inside = {
                tensor: value.nbytes
                for tensor, value in named_tensors(self.model)
                if name in ("", tensor) or tensor.startswith(f"{name}.")
            }
            if largest_visit(self.model, inside, whole_classes) > limit:
                self.execution[name] = "cpu"
                self.offload[name] = str(self.device_map[name]) == "disk"

    def _mapped_to(self, location: str) -> list[str]:
        return [name for name, mapped in self.device_map.items() if str(mapped) == location]

    def _part(self, state: Mapping[str, torch.Tensor], location: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a state dict that are mapped to a location and have values."""
        names = self._mapped_to(location)
        part = state if names == [""] else extract_submodules_state_dict(state, names)
        return {
            name: value.to("cpu") if isinstance(value, Placeholder) else value
            for name, value in part.items()
            if has_values(value)
        }

    def find_offloaded_weights(self, state_dict: Mapping[str, torch.Tensor] | None) -> None:
        """Find all weights that are offloaded, and write those that are only in memory and mapped to the disk."""
        in_memory: dict[str, torch.Tensor] = {}
        if any(self.offload[name] for name in self._mapped_to("cpu")):
            in_memory = self._part(self.model.state_dict() if state_dict is None else state_dict, "cpu")
        self.read_weights()
        directory, merged = self.directory, self.index
        on_disk = self._mapped_to("disk")
        if on_disk:
            if not merged and directory is None:
                raise ConfigurationError(
                    f"{len(on_disk)} modules are mapped to the disk, but the location of their weights is unknown: "
                    "give offload_dir= or offload_index=, or load the model with load_checkpoint_and_dispatch"
                )
            if directory is not None:
                if not merged and not (directory / OFFLOAD_INDEX_NAME).is_file():
                    offload_state_dict(directory, self._part(self.model.state_dict(), "disk"))
                if (directory / OFFLOAD_INDEX_NAME).is_file():
                    merged = {**OffloadedWeightsLoader(save_folder=directory).index, **merged}
            self._add_tied_names(in_memory, merged)
            self.weights = OffloadedWeightsLoader(in_memory, directory, merged)
            self.weights.add_open_files(self.files)
        elif in_memory:
            self._add_tied_names(in_memory, {})
            self.weights = OffloadedWeightsLoader(state_dict=in_memory)
        self.refuse_empty(name for name in self.weights or () if location_of(name, self.offload))

    def read_weights(self) -> None:
        """Read from the offload index what an earlier map offloaded and this one keeps in memory."""
        empty = [name for name in on_meta(self.model) if not location_of(name, self.offload)]
        directory, index = self.directory, self.index
        if empty and directory is not None and (directory / OFFLOAD_INDEX_NAME).is_file():
            index = {**OffloadedWeightsLoader(save_folder=directory).index, **index}
        if not empty or not index:
            return
        weights = OffloadedWeightsLoader({}, directory, index)
        weights.add_open_files(self.files)
        tied = find_tied_parameters(self.model)
        for name in empty:
            if name in index:
                set_module_tensor_to_device(self.model, name, "cpu", value=weights[name])
        retie_parameters(self.model, tied)

    def _add_tied_names(self, in_memory: dict[str, torch.Tensor], index: dict[str, Any]) -> None:
        """Add all names of offloaded tied weights, of which checkpoints and state dicts store one."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for group in find_tied_parameters(self.model):
            absent = [name for name in group if name not in in_memory and name not in index]
            absent = [name for name in absent if location_of(name, self.offload)]
            stored = next((name for name in group if name in in_memory or name in index), None)
            if stored in index:
                entry = {"file": stored, "weight_name": stored, **index[stored]}
                index.update(dict.fromkeys(absent, entry))
            elif stored is not None:
                in_memory.update(dict.fromkeys(absent, in_memory[stored]))
            elif has_values(parameters[group[0]]):
                in_memory.update(dict.fromkeys(absent, parameters[group[0]].detach().to("cpu")))

    def refuse_empty(self, offloaded: Iterable[str]) -> None:
        """Refuse tensors without values, except offloaded ones."""
        empty = on_meta(self.model, offloaded)
        if empty:
            raise ConfigurationError(
                f"{type(self.model).__name__} has {counted(len(empty), 'tensor')} without values: "
                f"{', '.join(empty[:8])}. Load the model's weights first; buffers that no checkpoint holds keep their "
                "values in init_empty_weights(include_buffers=False)."
            )

    def room(self, max_memory: MaxMemory | None) -> int | None:
        """Return bytes that the limit of the main device leaves for offloaded weights; None without a limit."""
        main = as_device(self.main)
        key = "cpu" if main.type == "cpu" else main.index or 0
        limit = None if max_memory is None else get_max_memory(dict(max_memory)).get(key)
        if limit is None:
            return None
        resident: dict[int, int] = {}
        for name, tensor in named_tensors(self.model):
            may_leave = self.offload_buffers or isinstance(tensor, nn.Parameter)
            stays = not (may_leave and location_of(name, self.offload))
            if stays and str(location_of(name, self.execution)) == str(self.main):
                resident[id(tensor)] = tensor.nbytes
        return max(0, limit - sum(resident.values()))

    def attach_hooks(
        self, skip_keys: str | Sequence[str] | None, preload_module_classes: Sequence[str], room: int | None
    ) -> None:
        """Place the weights, and attach the hooks."""
        tied = find_tied_parameters(self.model)
        check_tied_parameters_on_same_device(tied, self.device_map)
        modules = {name for name, _ in self.model.named_modules(remove_duplicate=False)}
        self._place_single_tensors([name for name in self.device_map if name not in modules], preload_module_classes)
        attach_align_device_hook_on_blocks(
            self.model,
            execution_device={name: device for name, device in self.execution.items() if name in modules},
            offload={name: offload for name, offload in self.offload.items() if name in modules},
            offload_buffers=self.offload_buffers,
            weights_map=self.weights,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=self._tied_params_map(tied),
        )
        for group in tied:
            if len({str(location_of(name, self.device_map)) for name in group}) == 1:
                retie_parameters(self.model, [group])
        _complete_offload(self.model, room)

    def _place_single_tensors(self, names: Sequence[str], preload_module_classes: Sequence[str]) -> None:
        """Place tensors with their own map entry: those that a module whose parts are split up reads itself."""
        offloaded: dict[tuple[str, str], list[str]] = {}
        # A module under several names gets one hook, for its first name.
        first_names = {name for path, module in self.model.named_modules() for name, _ in direct_members(path, module)}
        for name in names:
            if name not in first_names:
                continue
            if self.offload[name]:
                path = visiting_module(self.model, name, preload_module_classes)
                key = name[len(path) + 1 :] if path else name
                offloaded.setdefault((path, str(self.execution[name])), []).append(key)
            else:
                set_module_tensor_to_device(self.model, name, self.execution[name])
        for (path, _), keys in offloaded.items():
            prefix = f"{path}." if path else ""
            hook = AlignDevicesHook(
                self.execution[prefix + keys[0]],
                offload=True,
                weights_map=PrefixedDataset(self.weights or {}, prefix),
                offload_buffers=self.offload_buffers,
                place_submodules=any("." in key for key in keys),
            )
            hook.only, hook.moves_inputs = frozenset(keys), False
            add_hook_to_module(self.model.get_submodule(path), hook, append=True)

    def _tied_params_map(self, tied: Sequence[Sequence[str]]) -> TiedParamsMap:
        """Return an empty entry for the data pointer of each tied weight."""
        result: TiedParamsMap = {}
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        in_memory = {} if self.weights is None else self.weights.state_dict
        for group in tied:
            for name in group:
                if tensors[name].device.type != "meta":
                    result[tensors[name].data_ptr()] = {}
                if name in in_memory:
                    result[in_memory[name].data_ptr()] = {}
        return result


def disjoint_device_map(model: nn.Module, device_map: Mapping[str, Location]) -> dict[str, Location]:
    """Return an equivalent map without nested entries: a module with other entries inside is replaced by its parts."""
    split: set[str] = set()
    for name in device_map:
        while name:
            name = name.rpartition(".")[0]
            split.add(name)
    flat: dict[str, Location] = {}
    pending: list[tuple[str, Any, Location | None]] = [("", model, device_map.get(""))]
    while pending:
        name, part, location = pending.pop()
        if isinstance(part, nn.Module) and name in split:
            for key, member in reversed(list(direct_members(name, part))):
                pending.append((key, member, device_map.get(key, location)))
        elif location is not None:
            flat[name] = location
    return flat


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Location] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Model:
    """Load a checkpoint into a model, each weight directly to its device, and make the model ready to run.

    Args:
        model: the model, preferably on the meta device (:func:`init_empty_weights`).
        checkpoint: a file, an index of shards, a directory with one of them, a URL of any of these in object storage
            (``s3://bucket/model.safetensors``), or a Hub repository.
        device_map: devices of modules by name; or "auto" and "balanced" (distribute evenly over all accelerators),
            "balanced_low_0" (likewise, with as little as possible on the first one), "sequential" (fill one after the
            other). None: load without dispatching.
        max_memory: as in :func:`get_max_memory`, for the named maps and for :func:`dispatch_model`. None: the memory
            that is free now. The system takes the pages of mapped files back when it needs them.
        no_split_module_classes: classes whose modules are not split, for the named maps. None: the model's
            ``_no_split_modules``.
        offload_folder: the directory for weights on the disk that cannot be read in place.
        offload_buffers: offload buffers with their modules, too.
        dtype: the dtype of all floating point weights. None: those of the model.
        offload_state_dict: ignored; accepted for compatibility.
        skip_keys: names of keyword arguments, or of items of outputs, that are not moved between devices.
        preload_module_classes: classes that are loaded as a whole, as in :func:`dispatch_model`.
        force_hooks: attach hooks even if all modules are on one device.
        strict: refuse missing or unexpected names even if every tensor has values without them.
        full_state_dict: for sharded models without a device map: the checkpoint holds full tensors.
        broadcast_from_rank0: for sharded models without a device map: only rank 0 reads, and sends the others theirs.

    Returns:
        The model, with the map as ``hf_device_map`` unless ``device_map`` is None.

    Raises:
        ConfigurationError: an unknown map name; and the errors of :func:`load_checkpoint_in_model` and
            :func:`dispatch_model`.

    Examples:
        >>> with init_empty_weights():
        ...     empty = build_model()
        >>> model = load_checkpoint_and_dispatch(
        ...     empty, "checkpoint", device_map={"0": "cpu", "1": "cpu", "2": "disk"}, offload_folder="offload"
        ... )
        >>> model(torch.ones(1, 64)).shape
        torch.Size([1, 10])
    """
    check_type(model, nn.Module, "load_checkpoint_and_dispatch", "Pass a model: a torch.nn.Module.")
    main_device: Location | None = None
    inner = uncompiled(model)
    if isinstance(device_map, str):
        device_map = named_device_map(inner, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
        # Also when no module stays on an accelerator: each of them fits on one for its forward.
        limits = get_max_memory(max_memory)
        main_device = next((place for place, limit in limits.items() if limit > 0 and place not in HOST_AND_DISK), None)
    _undo_dispatch(inner)
    load_checkpoint_in_model(
        inner,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    places = {str(place) for place in device_map.values()}
    # Only where weights may have to move does it matter how much memory is free.
    may_move = len(places) > 1 or "disk" in places or (main_device is not None and str(main_device) not in places)
    if max_memory is None and may_move and not _has_address_limit():
        max_memory = {"cpu": devices.get("cpu").memory_free()}
    return dispatch_model(
        model,
        device_map,
        main_device=main_device,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        max_memory=max_memory,
    )


def _has_address_limit() -> bool:
    """Return True if the process may map only so much (``ulimit -v``), so that no files should stay mapped."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def named_device_map(
    model: nn.Module,
    name: str,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, Any] | None = None,
) -> dict[str, Location]:
    """Return the device map for "auto", "balanced" and so on; arguments as in :func:`load_checkpoint_and_dispatch`.

    Raises:
        ConfigurationError: unknown name.
    """
    if name not in NAMED_DEVICE_MAPS:
        raise ConfigurationError(
            f"device_map={name!r} is not one of {', '.join(NAMED_DEVICE_MAPS)}; or give a dictionary of modules and "
            "devices"
        )
    if no_split_module_classes is None:
        no_split_module_classes = sorted(getattr(model, "_no_split_modules", None) or ())
    if name != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero=name == "balanced_low_0"
        )
    return infer_auto_device_map(
        model,
        max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        offload_buffers=offload_buffers,
        skip_too_large=True,
    )
