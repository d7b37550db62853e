"""Running a model whose weights lie on several devices, in memory, and on the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

from .device_map.device_map_checks import check_device_map
from .device_map.infer import infer_auto_device_map
from .device_map.memory import HOST_AND_DISK, MaxMemory, get_balanced_memory
from .hooks.align import AlignDevicesHook
from .hooks.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from .hooks.base import add_hook_to_module, remove_hook_from_submodules
from .loading import OffloadRecord, load_checkpoint_in_model, offload_record, on_meta
from .offload.parent_read_params import borrows, lends, reader_of
from .offload.prefetch import add_read_ahead
from .offload.store import (
    OFFLOAD_INDEX_NAME,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    offload_state_dict,
)
from .sizes import parts
from .tensors import Location, TiedParamsMap, as_device, set_module_tensor_to_device
from .tied_params import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    location_of,
    retie_parameters,
    with_shared_modules,
)

_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: nn.Module,
    execution_device: Location | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model in host memory; each module gets its own for the time of its forward.

    Args:
        model: the model; it is changed.
        execution_device: where it is computed. None: where its first parameter is.
        offload_buffers: buffers too.
        state_dict: the weights. None: those that the model has.
        preload_module_classes: classes that are loaded as a whole, for modules that use weights of submodules without
            calling them.

    Returns:
        The model.
    """
    if execution_device is None:
        execution_device = next(model.parameters()).device
    weights = (
        {name: value.to("cpu") for name, value in model.state_dict().items()} if state_dict is None else state_dict
    )
    return _offload_whole(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Location | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep all weights of a model in a folder; each module gets its own for the time of its forward.

    Args:
        model: the model; it is changed.
        offload_dir: the folder. What it holds already (see :func:`offload_state_dict`) is used; otherwise the weights
            are written.
        execution_device: where it is computed. None: where its first parameter is.
        offload_buffers: buffers too.
        preload_module_classes: as in :func:`cpu_offload`.

    Returns:
        The model.
    """
    if not (Path(offload_dir) / OFFLOAD_INDEX_NAME).is_file():
        offload_state_dict(offload_dir, model.state_dict())
    if execution_device is None:
        execution_device = next(model.parameters()).device
    return _offload_whole(
        model,
        execution_device,
        OffloadedWeightsLoader(save_folder=offload_dir),
        offload_buffers,
        preload_module_classes,
    )


def _offload_whole(
    model: nn.Module,
    execution_device: Location,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights
        if isinstance(weights, OffloadedWeightsLoader)
        else OffloadedWeightsLoader(state_dict=weights),
        preload_module_classes=preload_module_classes,
    )
    add_read_ahead(model)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Location],
    main_device: Location | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Spread a model over devices as a map says, and let inputs and offloaded weights come to where they are needed.

    Modules mapped to an accelerator stay there. Those mapped to "cpu", beside accelerators, and to "disk" visit the
    main device for each forward; the next ones are fetched while one is computed.

    Args:
        model: the model; it is changed.
        device_map: devices of modules by name: a number, a torch device, "cpu" or "disk".
        main_device: where offloaded modules are computed. None: the first accelerator of the map, else the CPU.
        state_dict: weights of the modules on the CPU. None: those that the model has.
        offload_dir: the folder of weights on the disk; those that are not there are written.
        offload_index: where weights on the disk are, as for :class:`OffloadedWeightsLoader`.
        offload_buffers: buffers of offloaded modules visit too, instead of staying on the main device.
        skip_keys: names of keyword arguments, or of items of outputs, that are not moved between devices.
        preload_module_classes: as in :func:`cpu_offload`.
        force_hooks: hooks even where all is on one device.

    Returns:
        The model, with the map as ``hf_device_map``.

    Raises:
        ConfigurationError: a map that leaves something out or names what is not there; weights for the disk, and
            neither folder nor index to find them by; tensors that have no values.
    """
    check_device_map(model, device_map)
    _undo_dispatch(model)
    whole = tuple(preload_module_classes or ())
    plan = _Dispatch(
        model, disjoint_device_map(model, with_shared_modules(model, device_map), whole), main_device, offload_buffers
    )
    if plan.needs_hooks or force_hooks:
        plan.collect(state_dict, offload_dir, offload_index)
        plan.attach(skip_keys, whole)
    else:
        plan.refuse_empty(())
        model.to(as_device(next(iter(device_map.values()))))
    model.__dict__["hf_device_map"] = dict(device_map)
    _give_encoder_a_hook(model)
    return model


def _undo_dispatch(model: nn.Module) -> None:
    """Take away what an earlier dispatch has added."""
    if model.__dict__.pop("hf_device_map", None) is not None:
        remove_hook_from_submodules(model)


def _give_encoder_a_hook(model: nn.Module) -> None:
    """``generate`` of transformers adds one to the encoder of a model that has a device map, with code of the
    reference.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        find: Any = model.get_encoder
        encoder = find()
        if not hasattr(encoder, "_hf_hook"):
            add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))


class _Dispatch:
    """One dispatch."""

    def __init__(
        self, model: nn.Module, device_map: dict[str, Location], main: Location | None, offload_buffers: bool
    ) -> None:
        self.model = model
        self.device_map = device_map
        self.offload_buffers = offload_buffers
        accelerators = [place for place in device_map.values() if str(place) not in HOST_AND_DISK]
        self.main = main if main is not None else (accelerators[0] if accelerators else "cpu")
        offloaded = {"disk"} if as_device(self.main).type == "cpu" else set(HOST_AND_DISK)
        self.offload = {name: str(place) in offloaded for name, place in device_map.items()}
        self.execution = {
            name: self.main if str(place) in HOST_AND_DISK else place for name, place in device_map.items()
        }
        self.weights: OffloadedWeightsLoader | None = None

    @property
    def needs_hooks(self) -> bool:
        """Whether there is more than one place."""
        return len({str(place) for place in self.device_map.values()}) > 1 or any(self.offload.values())

    def on(self, location: str) -> list[str]:
        """Names of the modules mapped there."""
        return [name for name, place in self.device_map.items() if str(place) == location]

    def collect(
        self,
        state_dict: Mapping[str, torch.Tensor] | None,
        folder: str | os.PathLike[str] | None,
        index: Mapping[str, Any] | None,
    ) -> None:
        """Find all weights that are offloaded."""
        in_memory: dict[str, torch.Tensor] = {}
        if any(self.offload[name] for name in self.on("cpu")):
            held = self.model.state_dict() if state_dict is None else state_dict
            in_memory = {name: value for name, value in self._part(held, "cpu").items() if value.device.type != "meta"}
        record = offload_record(self.model) if index is None else None
        self.weights = self._loader(in_memory, record or OffloadRecord(), folder, index)
        known = self.weights if self.weights is not None else {}
        self.refuse_empty(name for name in known if self._is_offloaded(name))

    def _part(self, state: Mapping[str, torch.Tensor], location: str) -> dict[str, torch.Tensor]:
        names = self.on(location)
        return dict(state) if "" in names and len(names) == 1 else extract_submodules_state_dict(state, names)

    def _is_offloaded(self, name: str) -> bool:
        location = location_of(name, self.device_map)
        return location is not None and self.offload[next(key for key in _around(name) if key in self.device_map)]

    def _loader(
        self,
        in_memory: dict[str, torch.Tensor],
        record: OffloadRecord,
        folder: str | os.PathLike[str] | None,
        index: Mapping[str, Any] | None,
    ) -> OffloadedWeightsLoader | None:
        on_disk = self.on("disk")
        if not on_disk:
            return OffloadedWeightsLoader(state_dict=in_memory) if in_memory else None
        place = folder if folder is not None else record.folder
        found: dict[str, Any] = {**record.index, **(index or {})}
        if not found and place is not None and not (Path(place) / OFFLOAD_INDEX_NAME).is_file():
            offload_state_dict(
                place, {n: v for n, v in self._part(self.model.state_dict(), "disk").items() if v.device.type != "meta"}
            )
        if not found and place is None:
            raise ConfigurationError(
                f"{len(on_disk)} modules are mapped to the disk, and nothing says where their weights are: give "
                "offload_dir= or "
                "offload_index=, or load the model with load_checkpoint_and_dispatch"
            )
        has_folder = place is not None and (Path(place) / OFFLOAD_INDEX_NAME).is_file()
        if has_folder:
            found = {**OffloadedWeightsLoader(save_folder=place).index, **found}
        loader = OffloadedWeightsLoader(in_memory, place, found)
        loader.adopt(record.files)
        return loader

    def refuse_empty(self, offloaded: Any) -> None:
        """Refuse tensors without values.

        Raises:
            ConfigurationError: naming them.
        """
        empty = on_meta(self.model, offloaded)
        if empty:
            raise ConfigurationError(
                f"{len(empty)} tensors of {type(self.model).__name__} have no values, and nothing says where they are: "
                f"{', '.join(empty[:8])}. Load the model's weights first; buffers that no checkpoint holds keep their "
                "values in "
                "init_empty_weights(include_buffers=False)."
            )

    def attach(self, skip_keys: str | Sequence[str] | None, preload_module_classes: Sequence[str]) -> None:
        """Place the weights, and add the hooks."""
        tied = find_tied_parameters(self.model)
        check_tied_parameters_on_same_device(tied, self.device_map)
        modules = {name for name, _ in self.model.named_modules(remove_duplicate=False)}
        self._place_tensors([name for name in self.device_map if name not in modules], preload_module_classes)
        attach_align_device_hook_on_blocks(
            self.model,
            execution_device={name: place for name, place in self.execution.items() if name in modules},
            offload={name: offload for name, offload in self.offload.items() if name in modules},
            offload_buffers=self.offload_buffers,
            weights_map=self.weights,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=self._shared_weights(tied),
        )
        retie_parameters(self.model, [group for group in tied if self._on_one_device(group)])
        add_read_ahead(self.model)

    def _place_tensors(self, names: Sequence[str], preload_module_classes: Sequence[str]) -> None:
        """Place tensors that are in the map by their own names: those that a module whose parts go to several places
        reads itself.
        """
        offloaded: dict[tuple[str, str], list[str]] = {}
        # A module may be in the model under several names; it has one hook for them.
        held = {name for path, module in self.model.named_modules() for name, _ in parts(path, module)}
        for name in (name for name in names if name in held):
            if self.offload[name]:
                path = reader_of(self.model, name, preload_module_classes)
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

    def _on_one_device(self, group: Sequence[str]) -> bool:
        return len({str(location_of(name, self.device_map)) for name in group}) == 1

    def _shared_weights(self, tied: Sequence[Sequence[str]]) -> TiedParamsMap:
        """An empty entry for the address of each shared weight."""
        held: TiedParamsMap = {}
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        for name in (name for group in tied for name in group):
            if tensors[name].device.type != "meta":
                held[tensors[name].data_ptr()] = {}
            if self.weights is not None and name in self.weights.state_dict:
                held[self.weights.state_dict[name].data_ptr()] = {}
        return held


def disjoint_device_map(
    model: nn.Module, device_map: Mapping[str, Location], whole: Sequence[str] = ()
) -> dict[str, Location]:
    """The same map, in which nothing is inside of something else: a module with exceptions is replaced by its parts.

    So is one whose weights are read by a module around it, down to its tensors; ``whole`` names classes that do that.
    """
    split = {around for name in device_map for around in _around(name)[1:]}
    found: dict[str, Location] = {}
    pending: list[tuple[str, Any, Location | None, bool]] = [("", model, device_map.get(""), False)]
    while pending:
        name, part, location, borrowed = pending.pop()
        if isinstance(part, nn.Module) and (borrowed or name in split or (name and lends(part))):
            inside = borrowed or borrows(part, whole)
            pending += [
                (key, inner, device_map.get(key, location), inside) for key, inner in reversed(list(parts(name, part)))
            ]
        elif location is not None:
            found[name] = location
    return found


def _around(name: str) -> list[str]:
    """A name, and those of the modules around it from the inside outwards."""
    found = [name]
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def load_checkpoint_and_dispatch(
    model: nn.Module,
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
) -> nn.Module:
    """Load a checkpoint into a model, each weight directly to its device, and make the model ready to run.

    Args:
        model: the model, best on the meta device (:func:`init_empty_weights`).
        checkpoint: as in :func:`load_checkpoint_in_model`.
        device_map: devices of modules by name; or "auto" and "balanced" (spread over all accelerators evenly),
            "balanced_low_0" (likewise, the first one as empty as possible), "sequential" (fill one after the other).
            None: load, and do not dispatch.
        max_memory: as in :func:`get_max_memory`, for the named maps.
        no_split_module_classes: classes whose modules must stay whole, for the named maps. None: the model's
            ``_no_split_modules``.
        offload_folder: as in :func:`load_checkpoint_in_model`.
        offload_buffers: as in :func:`dispatch_model`.
        dtype: as in :func:`load_checkpoint_in_model`.
        offload_state_dict: as in :func:`load_checkpoint_in_model`.
        skip_keys: as in :func:`dispatch_model`.
        preload_module_classes: as in :func:`dispatch_model`.
        force_hooks: as in :func:`dispatch_model`.
        strict: as in :func:`load_checkpoint_in_model`.
        full_state_dict: as in :func:`load_checkpoint_in_model`.
        broadcast_from_rank0: as in :func:`load_checkpoint_in_model`.

    Returns:
        The model.

    Raises:
        ConfigurationError: a map of an unknown name; and what :func:`load_checkpoint_in_model` and
            :func:`dispatch_model` refuse.
    """
    if isinstance(device_map, str):
        device_map = named_device_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    _undo_dispatch(model)
    load_checkpoint_in_model(
        model,
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
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def named_device_map(
    model: nn.Module,
    name: str,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    offload_buffers: bool = False,
) -> dict[str, Location]:
    """The device map that goes by a name ("auto", ...); arguments as in :func:`load_checkpoint_and_dispatch`.

    Raises:
        ConfigurationError: no such name.
    """
    if name not in _NAMED_MAPS:
        raise ConfigurationError(
            f"device_map={name!r} is not one of {', '.join(_NAMED_MAPS)}; or give a dictionary of modules and devices"
        )
    if no_split_module_classes is None:
        no_split_module_classes = sorted(getattr(model, "_no_split_modules", None) or ())
    if name != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, low_zero=name == "balanced_low_0"
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes=no_split_module_classes, dtype=dtype, offload_buffers=offload_buffers
    )
