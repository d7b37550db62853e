"""Quantizing a model while it is loaded, or afterwards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from accel_bigmodel import check_device_map, dispatch_model, load_checkpoint_in_model, named_device_map
from accel_bigmodel.checkpoint.checkpoint_mapping import check_match, match_checkpoint, model_tensors
from accel_bigmodel.checkpoint.files import checkpoint_files
from accel_bigmodel.checkpoint.safetensors_file import SafetensorsFile
from accel_bigmodel.checkpoint.tensor_files import CheckpointFile, open_file
from accel_bigmodel.device_map.memory import MaxMemory
from accel_bigmodel.loading import progress_bar
from accel_bigmodel.tensors import Location, as_device
from accel_bigmodel.tied_params import location_of
from accel_state import devices
from accel_state.errors import ConfigurationError
from accel_state.paths import as_path, open_for_writing, refuse_link
from accel_state.safetensors_writer import write_safetensors
from accel_state.state import PartialState, is_initialized

from .layers import (
    BnbQuantizationConfig,
    check_names,
    contains_name,
    get_keys_to_not_convert,
    is_float,
    layers_to_quantize,
    replace_layer,
)
from .offloaded_layers import OffloadedLayer, Read, offload_layer
from .quantizers.base import Quantizer
from .quantizers.registry import QUANTIZERS

Model = TypeVar("Model", bound=nn.Module)


def load_and_quantize_model(
    model: Model,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Location] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> Model:
    """Quantize the linear layers of a model, and put it on its devices.

    Weights are quantized one by one as they are read, so a model on the meta device never takes more memory than the
    quantized model and one weight. Checkpoints that are quantized already are loaded as they are. Layers on the disk
    stay quantized.

    Args:
        model: the model: on the meta device (``init_empty_weights``), or with weights. It is changed.
        bnb_quantization_config: how to quantize, and the dtype of everything else.
        weights_location: a file, an index of shards, a directory with one of them, or a Hub repository. None: the
            weights of the model.
        device_map: the device of each module ("cpu", "disk", a number, a torch device), or "auto", "balanced",
            "balanced_low_0", "sequential". None: the device of this process.
        no_split_module_classes: classes whose modules are not split, for the named maps. None: the model's
            ``_no_split_modules``.
        max_memory: bytes to use on each device, for the named maps.
        offload_folder: the directory for weights on the disk, unless their safetensors file can be read in place.
        offload_state_dict: ignored; accepted for compatibility. Weights are never held twice.

    Returns:
        The model, with ``is_loaded_in_8bit``, ``is_loaded_in_4bit``, ``quantization_config`` and ``hf_device_map``.

    Raises:
        ConfigurationError: a checkpoint that does not fit, unknown module names, or an incomplete device map. The model
            is unchanged then.
        MissingDependencyError: bitsandbytes is not installed.
    """
    config = bnb_quantization_config
    quantizer = QUANTIZERS.load(config.quantizer)(config)
    check_names(model, "skip_modules", config.skip_modules)
    check_names(model, "keep_in_fp32_modules", config.keep_in_fp32_modules)
    if any(isinstance(module, quantizer.layer_class) for module in model.modules()):
        raise ConfigurationError("the model has quantized layers already. Build it again, and quantize it once.")
    skip = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    layers = layers_to_quantize(model, [*skip, *(config.keep_in_fp32_modules or ())])
    weights = _Weights(model, weights_location)
    sources = {name: f"{name}.weight" for name in layers}
    if weights_location is not None:
        sources = _match_weights(model, layers, weights, quantizer, str(weights_location))
    locations = _device_map(model, layers, quantizer, device_map, no_split_module_classes, max_memory)
    on_disk = [name for name, location in locations.items() if str(location) == "disk"]
    folder = None if offload_folder is None else as_path("offload_folder", offload_folder)
    if on_disk and offload_folder is None:
        raise ConfigurationError(
            f"the device map puts {', '.join(on_disk[:4])} on the disk: give offload_folder, or raise max_memory."
        )
    quantization = _ModelQuantization(model, quantizer, weights, locations, folder)
    for name, linear in progress_bar("Quantizing", iterable=list(layers.items())):
        quantization.quantize_layer(name, linear, sources[name])
    quantization.load_other_weights(weights_location)
    quantization.dispatch()
    model.__dict__.update(
        is_loaded_in_8bit=bool(getattr(config, "load_in_8bit", False)),
        is_loaded_in_4bit=bool(getattr(config, "load_in_4bit", False)),
        quantization_config=config,
        hf_device_map=locations,
    )
    return model


class _Weights:
    """The weights to quantize, of the model itself or of the files of a checkpoint."""

    def __init__(self, model: nn.Module, location: str | os.PathLike[str] | None) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.files: dict[str, CheckpointFile] = {}
        if location is None:
            self.parameters = dict(model.named_parameters(remove_duplicate=False))
            empty = [name for name, tensor in self.parameters.items() if tensor.is_meta]
            if empty:
                raise ConfigurationError(
                    f"{len(empty)} weights of the model have no values: they are on the meta device "
                    f"({', '.join(empty[:3])}, ...). Give the checkpoint as weights_location, or load it first."
                )
            return
        for path, names in checkpoint_files(location).items():
            file = open_file(path)
            self.files.update(dict.fromkeys(file.names() if names is None else names, file))

    @property
    def names(self) -> Mapping[str, Any]:
        return self.files or self.parameters

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, mapped if its file allows."""
        return self.files[name].tensors([name])[name] if self.files else self.parameters[name].detach()

    def common_file(self, names: list[str]) -> SafetensorsFile | None:
        """Return the safetensors file that holds all of some tensors."""
        files = {id(self.files[name]): self.files[name] for name in names} if self.files else {}
        file = next(iter(files.values()), None)
        return file if len(files) == 1 and isinstance(file, SafetensorsFile) else None


def _match_weights(
    model: nn.Module, layers: Mapping[str, nn.Linear], weights: _Weights, quantizer: Quantizer, location: str
) -> dict[str, str]:
    """Return the name in the checkpoint of each layer's weight, after a check of all names, shapes and dtypes."""
    tensors, unsaved_buffers = model_tensors(model)
    quantized: set[str] = set()
    companions: set[str] = set()
    for name in weights.names:
        entries = quantizer.companions(name, weights.names) if name.endswith("weight") else []
        if entries:
            quantized.add(name)
            companions.update(entries)
    model_shapes = {name: tuple(tensor.tensor.shape) for tensor in tensors for name in tensor.names}
    shapes = {}
    for name, file in weights.files.items():
        if name not in companions:
            # A quantized weight has another shape than the weight that it represents.
            shapes[name] = model_shapes.get(name, ()) if name in quantized else file.shape(name)
    match = match_checkpoint(tensors, shapes, unsaved_buffers)
    check_match(model, location, match, strict=False)
    sources: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in match.sources:
            sources.update(dict.fromkeys(tensor.names, match.sources[tensor.name]))
        if len({name.removesuffix(".weight") in layers for name in tensor.names}) > 1:
            # Quantizing one of several tied weights unties them; checkpoints of such models hold both.
            sources.update({name: name for name in tensor.names if name in shapes})
    for name, source in sources.items():
        layer, _, attribute = name.rpartition(".")
        to_quantize = attribute == "weight" and layer in layers
        dtype = weights.files[source].dtype(source)
        if source in quantized and not to_quantize:
            raise ConfigurationError(
                f"the checkpoint holds {name} quantized, but the configuration does not quantize {layer}. Load it with "
                "the skip_modules and keep_in_fp32_modules that it was saved with."
            )
        if source not in quantized and to_quantize and dtype in (torch.int8, torch.uint8):
            raise ConfigurationError(
                f"the checkpoint holds {name} as {dtype}, quantized with another method than the configuration's. Load "
                "it with the load_in_8bit or load_in_4bit that it was saved with."
            )
    missing = [name for name in layers if f"{name}.weight" not in sources]
    if missing:
        raise ConfigurationError(
            f"the checkpoint {location} lacks the weights of {len(missing)} layers to quantize: "
            f"{', '.join(missing[:5])}."
        )
    return {name: sources[f"{name}.weight"] for name in layers}


def _device_map(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    quantizer: Quantizer,
    device_map: str | Mapping[str, Location] | None,
    no_split: Sequence[str] | None,
    max_memory: MaxMemory | None,
) -> dict[str, Location]:
    if device_map is None:
        return {"": PartialState().device if is_initialized() else devices.detect().device(0)}
    if not isinstance(device_map, str):
        check_device_map(model, device_map)
        return dict(device_map)
    config = quantizer.config
    dtypes: dict[str, Any] = {
        name: torch.float32 for name, _ in model.named_parameters() if _contains_any(name, config.keep_in_fp32_modules)
    }
    dtypes.update({f"{name}.weight": quantizer.dtype for name in layers})
    return named_device_map(model, device_map, max_memory, no_split, config.torch_dtype, special_dtypes=dtypes)


def _read(file: SafetensorsFile, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return tensors of a file, mapped, by their names in the layer."""
    tensors = file.tensors(names.values())
    return {name: tensors[source] for name, source in names.items()}


def _contains_any(name: str, parts: Sequence[str] | None) -> bool:
    return any(contains_name(name, part) for part in parts or ())


class _ModelQuantization:
    """The quantization of one model."""

    def __init__(
        self,
        model: nn.Module,
        quantizer: Quantizer,
        weights: _Weights,
        locations: dict[str, Location],
        directory: Path | None,
    ) -> None:
        self.model, self.quantizer, self.weights, self.locations = model, quantizer, weights, locations
        self.directory = directory
        accelerators = [location for location in locations.values() if str(location) not in ("cpu", "disk")]
        self.main = as_device(accelerators[0]) if accelerators else torch.device("cpu")

    def quantize_layer(self, name: str, linear: nn.Linear, source: str) -> None:
        """Replace a linear layer by a quantized one, on its device or offloaded."""
        location = location_of(name, self.locations)
        if location is None:
            location = location_of(f"{name}.weight", self.locations)
        assert location is not None
        is_offloaded = location == "disk" or (str(location) == "cpu" and self.main.type != "cpu")
        device = self.main if is_offloaded else as_device(location)
        prefix = source.removesuffix("weight")
        entries = [source, *self.quantizer.companions(source, self.weights.names)]
        names = {entry.removeprefix(prefix): entry for entry in entries}
        is_quantized = len(names) > 1
        file = self.weights.common_file(entries) if is_offloaded and is_quantized else None
        # Read before the layer is replaced, because the model itself may hold the weight.
        tensors = {} if file is not None else {key: self.weights.read(entry) for key, entry in names.items()}
        layer = replace_layer(self.model, name, linear, self.quantizer)
        if file is not None:
            offload_layer(layer, self.quantizer, partial(_read, file, names), self.main)
            return
        if is_quantized:
            self.quantizer.restore(layer, tensors, torch.device("cpu") if is_offloaded else device)
        elif is_float(tensors["weight"]):
            self.quantizer.quantize(layer, tensors["weight"], device)
        else:
            raise ConfigurationError(
                f"the weight of {name} has the dtype {tensors['weight'].dtype}; only float32, float16 and bfloat16 can "
                "be quantized."
            )
        if is_offloaded:
            tensors = {key: tensor.cpu().contiguous() for key, tensor in self.quantizer.tensors(layer).items()}
            read = self._write(name, tensors) if location == "disk" else partial(dict, tensors)
            offload_layer(layer, self.quantizer, read, self.main)

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> Read:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name}.quantized.safetensors"
        temporary = path.with_suffix(f".{os.getpid()}.part")
        refuse_link(path)
        with open(open_for_writing(temporary), "wb") as file:
            write_safetensors(tensors, file)
        temporary.replace(path)
        return partial(_read, SafetensorsFile(path), {key: key for key in tensors})

    def load_other_weights(self, location: str | os.PathLike[str] | None) -> None:
        """Load or convert everything that is not quantized."""
        config = self.quantizer.config
        quantized: dict[Any, Any] = {}
        for module in self.model.modules():
            if isinstance(module, self.quantizer.layer_class):
                layer: Any = module
                quantized[layer], layer.weight = layer.weight, None
        try:
            if location is None:
                for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                    if is_float(tensor):
                        in_fp32 = _contains_any(name, config.keep_in_fp32_modules)
                        tensor.data = tensor.data.to(torch.float32 if in_fp32 else config.torch_dtype)
                return
            with warnings.catch_warnings():
                # All names were checked before; quantized weights would be reported as unexpected now.
                warnings.filterwarnings("ignore", message="the checkpoint .* does not fit")
                load_checkpoint_in_model(
                    self.model,
                    location,
                    device_map=self.locations,
                    offload_folder=self.directory,
                    dtype=config.torch_dtype,
                    keep_in_fp32_modules=config.keep_in_fp32_modules,
                )
        finally:
            for layer, weight in quantized.items():
                layer.weight = weight

    def dispatch(self) -> None:
        """Put the model on its devices, with hooks if there are several."""
        offloads = [module._offload for module in self.model.modules() if isinstance(module, OffloadedLayer)]
        for offload in offloads:
            offload.in_state_dict = False  # dispatching must not read or write these weights
        try:
            dispatch_model(self.model, self.locations, main_device=self.main, offload_dir=self.directory)
        finally:
            for offload in offloads:
                offload.in_state_dict = True
