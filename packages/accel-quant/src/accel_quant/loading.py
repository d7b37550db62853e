"""Quantizing a model, while it is loaded or afterwards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    check_device_map,
    dispatch_model,
    get_balanced_memory,
    infer_auto_device_map,
    load_checkpoint_in_model,
)
from accel_bigmodel.checkpoint.checkpoint_mapping import check_match, match, places_of
from accel_bigmodel.progress import progress
from accel_bigmodel.tensors import Location, as_device
from accel_bigmodel.tied_params import location_of
from accel_state import devices
from accel_state.errors import ConfigurationError
from accel_state.state import PartialState, is_initialized

from .config import BnbQuantizationConfig
from .layers import (
    check_found,
    check_names,
    get_keys_to_not_convert,
    is_float,
    is_inside,
    layers_to_quantize,
    put_layer,
)
from .offloaded_layers import FileStore, MemoryStore, StoredLayer, keep_elsewhere
from .quantizers.base import Quantizer
from .quantizers.registry import QUANTIZERS
from .weight_source import CheckpointWeights, ModelWeights, Weights

_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Location] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize the linear layers of a model, and put it on its devices.

    Weights are quantized one by one as they are read, so a model on the meta device never takes more memory than it has
    quantized. A checkpoint that holds quantized weights is taken as it is. Layers on the disk are kept there quantized,
    in 8 bits and in 4.

    Args:
        model: the model: on the meta device (``init_empty_weights``), or with weights. It is changed.
        bnb_quantization_config: how to quantize; and the type of all that is not quantized.
        weights_location: a file, an index of shards, a folder with one of them, or a repository on the Hub. None: the
            weights that the model has.
        device_map: the device of each module ("cpu", "disk", a number, a torch device), or "auto", "balanced",
            "balanced_low_0", "sequential". None: the device of this process.
        no_split_module_classes: classes whose instances stay on one device in a map that is found. None: what the model
            declares.
        max_memory: bytes to use on each device in a map that is found.
        offload_folder: where weights on the disk are written. A checkpoint in safetensors that needs no change is read
            in place instead.
        offload_state_dict: accepted for callers of other libraries; weights are never held twice here.

    Returns:
        The model, with ``is_loaded_in_8bit``, ``is_loaded_in_4bit``, ``quantization_config`` and ``hf_device_map``.

    Raises:
        ConfigurationError: a checkpoint that does not fit, names that no module has, or a device map that leaves
            something out. The model is unchanged then.
        MissingDependencyError: bitsandbytes is not installed.
    """
    config = bnb_quantization_config
    quantizer = QUANTIZERS.load(config.quantizer)(config)
    check_names(model, "skip_modules", config.skip_modules)
    check_names(model, "keep_in_fp32_modules", config.keep_in_fp32_modules)
    if any(isinstance(module, quantizer.layer_class) for module in model.modules()):
        raise ConfigurationError("the model has quantized layers already. Build it anew, and quantize it once.")
    skip = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    found = layers_to_quantize(model, [*skip, *(config.keep_in_fp32_modules or ())])
    check_found(model, found)
    weights: Weights = ModelWeights(model) if weights_location is None else CheckpointWeights(weights_location)
    sources = _check_weights(model, found, weights, quantizer, weights_location)
    places = _device_map(model, found, quantizer, device_map, no_split_module_classes, max_memory)
    _check_folder(places, offload_folder)
    job = _Quantizing(model, quantizer, weights, places, None if offload_folder is None else Path(offload_folder))
    job.quantize(found, sources)
    job.load_rest(weights_location, offload_state_dict)
    job.dispatch()
    model.__dict__.update(
        is_loaded_in_8bit=bool(getattr(config, "load_in_8bit", False)),
        is_loaded_in_4bit=bool(getattr(config, "load_in_4bit", False)),
        quantization_config=config,
        hf_device_map=places,
    )
    return model


def _check_weights(
    model: nn.Module, found: Mapping[str, nn.Linear], weights: Weights, quantizer: Quantizer, location: Any
) -> dict[str, str]:
    """The name in the checkpoint of the weight of every layer to quantize, after a check of all names, shapes and
    types.
    """
    if isinstance(weights, ModelWeights):
        return {name: f"{name}.weight" for name in found}
    places, lost = places_of(model)
    quantized = {
        name: quantizer.companions(name, weights.names()) for name in weights.names() if name.endswith("weight")
    }
    companions = {companion for names in quantized.values() for companion in names}
    own = {name: tuple(place.tensor.shape) for place in places for name in place.names}
    # A quantized weight has another shape than the one it stands for.
    shapes = {
        name: own.get(name, ()) if quantized.get(name) else weights.shape(name)
        for name in weights.names()
        if name not in companions
    }
    fit = match(places, shapes, lost)
    check_match(model, str(location), fit, strict=False)
    sources = {name: fit.sources[place.name] for place in places if place.name in fit.sources for name in place.names}
    for place in places:
        to_quantize = {name.removesuffix(".weight") in found for name in place.names}
        if len(to_quantize) > 1:  # it will be shared no longer, and was not where the checkpoint is of such a model
            sources.update({name: name for name in place.names if name in shapes})
    for name in sources:
        _check_type(name, sources[name], found, weights, bool(quantized.get(sources[name])))
    missing = [name for name in found if f"{name}.weight" not in sources]
    if missing:
        some = ", ".join(missing[:5])
        raise ConfigurationError(
            f"the checkpoint {location} lacks the weights of {len(missing)} layers to quantize: {some}."
        )
    return {name: sources[f"{name}.weight"] for name in found}


def _check_type(
    name: str, source: str, found: Mapping[str, nn.Linear], weights: CheckpointWeights, quantized: bool
) -> None:
    layer, _, part = name.rpartition(".")
    is_weight = part == "weight"
    dtype = weights.dtype(source)
    if quantized and not (is_weight and layer in found):
        raise ConfigurationError(
            f"the checkpoint holds {name} quantized, and the configuration leaves {layer} as it is. Load it with the "
            "skip_modules and "
            "keep_in_fp32_modules that it was saved with."
        )
    if is_weight and layer in found and not quantized and dtype in (torch.int8, torch.uint8):
        raise ConfigurationError(
            f"the checkpoint holds {name} as {dtype}, quantized in another way than the configuration says. Load it "
            "with the "
            "load_in_8bit or load_in_4bit that it was saved with."
        )


def _main_device() -> torch.device:
    return PartialState().device if is_initialized() else devices.detect().device(0)


def _device_map(
    model: nn.Module,
    found: Mapping[str, nn.Linear],
    quantizer: Quantizer,
    device_map: str | Mapping[str, Location] | None,
    no_split: Sequence[str] | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, Location]:
    if device_map is None:
        return {"": _main_device()}
    if not isinstance(device_map, str):
        check_device_map(model, device_map)
        return dict(device_map)
    if device_map not in _NAMED_MAPS:
        raise ConfigurationError(
            f"device_map={device_map!r} is not one of {', '.join(_NAMED_MAPS)}; or give a dictionary of modules and "
            "devices."
        )
    whole = sorted(getattr(model, "_no_split_modules", None) or ()) if no_split is None else list(no_split)
    config = quantizer.config
    kept = config.keep_in_fp32_modules or ()
    types: dict[str, Any] = {
        name: torch.float32 for name, _ in model.named_parameters() if any(is_inside(name, part) for part in kept)
    }
    types.update({f"{name}.weight": quantizer.dtype for name in found})
    if device_map != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, whole, config.torch_dtype, types, low_zero=device_map == "balanced_low_0"
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes=whole, dtype=config.torch_dtype, special_dtypes=types
    )


def _check_folder(places: Mapping[str, Location], folder: str | os.PathLike[str] | None) -> None:
    on_disk = [name for name, place in places.items() if str(place) == "disk"]
    if on_disk and folder is None:
        raise ConfigurationError(
            f"the device map puts {', '.join(on_disk[:4])} on the disk, and nothing says where. Give offload_folder, "
            "or raise max_memory."
        )


@dataclass
class _Quantizing:
    """The quantization of one model."""

    model: nn.Module
    quantizer: Quantizer
    weights: Weights
    places: dict[str, Location]
    folder: Path | None

    def __post_init__(self) -> None:
        accelerators = [place for place in self.places.values() if str(place) not in ("cpu", "disk")]
        self.main = as_device(accelerators[0]) if accelerators else torch.device("cpu")

    def quantize(self, found: Mapping[str, nn.Linear], sources: Mapping[str, str]) -> None:
        """Replace every layer."""
        for name, linear in progress(list(found.items()), "Quantizing"):
            place = location_of(name, self.places)
            if place is None:
                place = location_of(f"{name}.weight", self.places)
            assert place is not None
            self._quantize(name, linear, sources[name], place)

    def _quantize(self, name: str, linear: nn.Linear, source: str, place: Location) -> None:
        elsewhere = place == "disk" or (str(place) == "cpu" and self.main.type != "cpu")
        device = self.main if elsewhere else as_device(place)
        names = {"weight": source, **self._companions(source)}
        # Read before the layer is replaced: the model itself may be what holds the weight.
        tensors = (
            {}
            if elsewhere and len(names) > 1 and self._in_place(names)
            else {key: self.weights.read(n) for key, n in names.items()}
        )
        layer = put_layer(self.model, name, linear, self.quantizer)
        if tensors and len(names) > 1:
            self.quantizer.restore(layer, tensors, torch.device("cpu") if elsewhere else device)
        elif tensors:
            self._quantize_weight(name, layer, tensors["weight"], device)
        if elsewhere:
            keep_elsewhere(layer, self.quantizer, self._store(name, layer, names, str(place), not tensors), self.main)

    def _companions(self, source: str) -> dict[str, str]:
        prefix = source.removesuffix("weight")
        return {other.removeprefix(prefix): other for other in self.quantizer.companions(source, self.weights.names())}

    def _in_place(self, names: Mapping[str, str]) -> bool:
        return self.weights.place(list(names.values())) is not None

    def _quantize_weight(self, name: str, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> None:
        if not is_float(weight):
            raise ConfigurationError(
                f"the weight of {name} has the type {weight.dtype}; only float32, float16 and bfloat16 can be "
                "quantized."
            )
        self.quantizer.quantize(layer, weight, device)

    def _store(
        self, name: str, layer: nn.Linear, names: Mapping[str, str], place: str, in_place: bool
    ) -> FileStore | MemoryStore:
        if in_place:
            path = self.weights.place(list(names.values()))
            assert path is not None
            return FileStore(path, names)
        tensors = {key: tensor.cpu().contiguous() for key, tensor in self.quantizer.tensors(layer).items()}
        if place != "disk":
            return MemoryStore(tensors)
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.quantized.safetensors"
        temporary = path.with_suffix(f".{os.getpid()}.part")
        save_file(tensors, temporary)
        temporary.replace(path)
        return FileStore(path, {key: key for key in tensors})

    def load_rest(self, location: str | os.PathLike[str] | None, offload_state_dict: bool) -> None:
        """Give everything that is not quantized its values and its type."""
        config = self.quantizer.config
        with self._without_quantized_weights():
            if location is None:
                self._cast()
                return
            with warnings.catch_warnings():
                # The names were checked before; what is quantized would now be reported as left over.
                warnings.filterwarnings("ignore", message="the checkpoint .* does not fit")
                load_checkpoint_in_model(
                    self.model,
                    location,
                    device_map=self.places,
                    offload_folder=self.folder,
                    dtype=config.torch_dtype,
                    offload_state_dict=offload_state_dict,
                    keep_in_fp32_modules=config.keep_in_fp32_modules,
                )

    @contextmanager
    def _without_quantized_weights(self) -> Iterator[None]:
        layers = [module for module in self.model.modules() if isinstance(module, self.quantizer.layer_class)]
        held = [layer._parameters["weight"] for layer in layers]
        for layer in layers:
            layer._parameters["weight"] = None
        try:
            yield
        finally:
            for layer, weight in zip(layers, held, strict=True):
                layer._parameters["weight"] = weight

    def _cast(self) -> None:
        config = self.quantizer.config
        kept = config.keep_in_fp32_modules or ()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if is_float(tensor):
                tensor.data = tensor.data.to(
                    torch.float32 if any(is_inside(name, part) for part in kept) else config.torch_dtype
                )

    def dispatch(self) -> None:
        """Put the model on its devices, with hooks where there are several."""
        stored = [module for module in self.model.modules() if isinstance(module, StoredLayer)]
        for layer in stored:
            layer._stored.in_state_dict = False
        try:
            dispatch_model(self.model, self.places, main_device=self.main, offload_dir=self.folder)
        finally:
            for layer in stored:
                layer._stored.in_state_dict = True
