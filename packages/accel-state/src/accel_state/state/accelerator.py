"""Precision and plugins of an Accelerator, in addition to the PartialState."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..collectives.single import Collectives
from ..context import SharedState
from ..devices.base import Device
from ..enums import DistributedType, PrecisionType
from ..errors import ConfigurationError
from ..options.core import CoreOptions
from .partial import PartialState
from .process_control import ProcessControl


def _from_partial(name: str, description: str) -> Any:
    """Return an attribute of the PartialState."""
    return property(
        lambda self: getattr(PartialState(), name),
        lambda self, value: setattr(PartialState(), name, value),
        doc=description,
    )


def _plugin(name: str, description: str) -> Any:
    """Return an entry of :attr:`AcceleratorState.plugins`; None if there is none."""

    def set_plugin(self: AcceleratorState, plugin: Any) -> None:
        self.plugins.pop(name, None)
        if plugin is not None:
            self.plugins[name] = plugin

    return property(lambda self: self.plugins.get(name), set_plugin, doc=description)


class AcceleratorState(ProcessControl, SharedState):
    """PartialState, and the settings of the Accelerator of this process.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None uses the launcher's setting, or "no".
        cpu: use the CPU even if an accelerator is available.
        dynamo_plugin: settings of torch.compile.
        deepspeed_plugin: settings of DeepSpeed, or a dictionary of them by name.
        fsdp_plugin: settings of FSDP.
        torch_tp_plugin: settings of tensor parallelism.
        megatron_lm_plugin: settings of Megatron-LM.
        parallelism_config: sizes of the mesh axes.
        **kwargs: passed to PartialState.

    Attributes:
        plugins: the settings in use, by name: "deepspeed", "fsdp", "torch_tp", "megatron", "mesh", or that of an
            installed strategy. The attributes with the names of the arguments are entries of it.

    Raises:
        ConfigurationError: the state exists already with another precision, or the precision is unknown.
    """

    _slot: ClassVar[str] = "accelerator"

    num_processes: int = _from_partial("num_processes", "The world size.")
    process_index: int = _from_partial("process_index", "The rank.")
    local_process_index: int = _from_partial("local_process_index", "The rank among the processes of this node.")
    stands_by: bool = _from_partial("stands_by", "Whether another replica of a fault-tolerant run logs and saves.")
    device: torch.device = _from_partial("device", "The device of this process.")
    backend: str | None = _from_partial("backend", "Name of the communication backend, or None in a single process.")
    debug: bool = _from_partial("debug", "Whether collectives check their inputs first.")
    fork_launched: bool = _from_partial("fork_launched", "Whether a notebook or debug launcher forked this process.")
    collectives: Collectives = _from_partial("collectives", "The collectives of this run.")
    device_backend: Device = _from_partial("device_backend", "The operations of this type of device.")

    deepspeed_plugins: Any = _plugin("deepspeed", "The settings of DeepSpeed, or a dictionary of them by name.")
    fsdp_plugin: Any = _plugin("fsdp", "The settings of FSDP.")
    torch_tp_plugin: Any = _plugin("torch_tp", "The settings of tensor parallelism.")
    megatron_lm_plugin: Any = _plugin("megatron", "The settings of Megatron-LM.")
    parallelism_config: Any = _plugin("mesh", "Sizes of the mesh axes.")

    plugins: dict[str, Any]
    dynamo_plugin: Any
    _mixed_precision: str
    _distributed_type: DistributedType | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if self.__dict__:
            self._check_same(mixed_precision, cpu)
            return
        chosen = mixed_precision if mixed_precision is not None else CoreOptions.read("mixed_precision") or "no"
        precision = PrecisionType(str(chosen).lower()).value
        PartialState(cpu, **kwargs)
        self._mixed_precision = precision
        self.dynamo_plugin = dynamo_plugin
        self.plugins = {}
        for name, plugin in (
            ("deepspeed", deepspeed_plugin),
            ("fsdp", fsdp_plugin),
            ("torch_tp", torch_tp_plugin),
            ("megatron", megatron_lm_plugin),
            ("mesh", parallelism_config),
        ):
            if plugin is not None:
                self.plugins[name] = plugin
        self._distributed_type = None

    def _check_same(self, mixed_precision: str | None, cpu: bool) -> None:
        if mixed_precision is not None and PrecisionType(str(mixed_precision).lower()).value != self._mixed_precision:
            raise ConfigurationError(
                f"mixed_precision={str(mixed_precision)!r}, but this process already has an Accelerator with "
                f"mixed_precision={self._mixed_precision!r}. Pass the same value, or call `accelerator.end_training()` "
                "on that one and delete it first."
            )
        PartialState(cpu)

    @property
    def distributed_type(self) -> DistributedType:
        """The type of run: the strategy's (DEEPSPEED, FSDP, ...), or the one of the devices."""
        return self._distributed_type or PartialState().distributed_type

    @distributed_type.setter
    def distributed_type(self, distributed_type: DistributedType) -> None:
        self._distributed_type = distributed_type

    @property
    def mixed_precision(self) -> str:
        """The mixed precision: "no", "fp16", "bf16" or "fp8"."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded by FSDP 2."""
        return getattr(self.fsdp_plugin, "fsdp_version", None) == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeed plugin; None without DeepSpeed."""
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            return plugins
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin of a name.

        Raises:
            ConfigurationError: the name is unknown.
        """
        plugins = self.deepspeed_plugins if isinstance(self.deepspeed_plugins, dict) else {}
        if name not in plugins:
            raise ConfigurationError(
                f"{name!r} is not one of the DeepSpeed plugins {', '.join(plugins) or '(none)'}. Pass a dictionary of "
                "them as deepspeed_plugins."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Use the DeepSpeed plugin of a name for the next call of ``prepare``.

        Raises:
            ConfigurationError: the name is unknown.
        """
        chosen = self.get_deepspeed_plugin(str(name))
        for plugin in self.deepspeed_plugins.values():
            plugin.unselect()
        chosen.select(_from_accelerator_state=True)

    def _picklable(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_owners"}

    def wait_for_everyone(self) -> None:
        PartialState().wait_for_everyone()

    def destroy_process_group(self, group: Any = None) -> None:
        """See :meth:`PartialState.destroy_process_group`."""
        PartialState().destroy_process_group(group)

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        """Clear the settings; with ``reset_partial_state`` the PartialState too."""
        super()._reset_state()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        text = f"{PartialState()._describe(self.distributed_type)}Mixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        return text if plugin is None else f"{text}ds_config: {plugin.deepspeed_config}\n"
