"""Settings given by name, by number, or as torch's own objects."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_state import devices, env
from accel_state.env import str_to_bool
from accel_state.errors import ConfigurationError
from accel_state.options import FsdpOptions
from accel_state.options.fsdp import SHARDING_STRATEGIES

from . import wrap_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy


def sharding_strategy(value: Any) -> Any:
    """Torch's ``ShardingStrategy`` by name, number or itself.

    Raises:
        ConfigurationError: there is none such.
    """
    from torch.distributed.fsdp import ShardingStrategy

    if isinstance(value, ShardingStrategy):
        return value
    name = one_of("sharding_strategy", by_number(value, SHARDING_STRATEGIES), SHARDING_STRATEGIES)
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if name == "HYBRID_SHARD_ZERO2" else ShardingStrategy[name]


def by_number(value: Any, names: Iterable[str]) -> str:
    """A name, from itself or from its place in the list, counted from 1."""
    numbered = dict(enumerate(names, start=1))
    text = str(getattr(value, "name", value)).strip().upper()
    return numbered.get(int(text), text) if text.isdigit() else text


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value as text.

    Raises:
        ConfigurationError: it is not one of those allowed; the message names the setting.
    """
    if str(value) not in set(allowed):
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return str(value)


def offload_1(offloads: bool) -> Any:
    """Torch's settings of offloading for version 1."""
    from torch.distributed.fsdp import CPUOffload

    return CPUOffload(offload_params=offloads)


def offload_2(offloads: bool) -> Any:
    """Torch's settings of offloading for version 2."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    # Pinned memory belongs to an accelerator; without one there is none to be had.
    return CPUOffloadPolicy(pin_memory=devices.detect().name != "cpu") if offloads else OffloadPolicy()


def precision_class(version: int) -> Any:
    """Torch's settings of mixed precision."""
    from torch.distributed import fsdp

    return fsdp.MixedPrecision if version == 1 else fsdp.MixedPrecisionPolicy


logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "no": torch.float32}
_PRECISION_KEYS = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}

# Settings of version 1 that version 2 has no use for, and why nothing is lost without them.
_ONLY_VERSION_1 = {
    "backward_prefetch": "version 2 always fetches the next parameters before the current gradients are reduced",
    "forward_prefetch": "version 2 prefetches implicitly; call model.set_modules_to_forward_prefetch for more",
    "use_orig_params": "version 2 always keeps the original parameters",
}


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded over the ranks.

    A field that is left out takes the launcher's value (``--fsdp_...``, ``fsdp_config`` or an ``FSDP_...`` variable),
    and else the default that stands here.

    Args:
        fsdp_version: 1 for torch's ``FullyShardedDataParallel`` (default), 2 for ``fully_shard``.
        sharding_strategy: version 1: "FULL_SHARD" (default), "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or
            "HYBRID_SHARD_ZERO2", its number (1 to 5), or torch's ``ShardingStrategy``.
        reshard_after_forward: version 2: free gathered parameters after the forward pass (default True). With version 1
            the name or value of a sharding strategy, as in ``sharding_strategy``.
        backward_prefetch: version 1: "BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH" (default).
        mixed_precision_policy: "bf16" or "fp16" for everything that this version lets one choose; a dictionary of
            ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype`` (version 2: ``output_dtype``); or torch's own policy.
            By default the Accelerator's mixed precision for parameters, with gradients reduced in fp32.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap" (default), or a policy of torch's form.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory; or torch's own policy.
        ignored_modules: modules that stay whole on every rank; or a regular expression that matches their whole names.
        state_dict_type: how ``save_state`` writes: "FULL_STATE_DICT" (default of version 1), "SHARDED_STATE_DICT"
            (default of version 2) or "LOCAL_STATE_DICT" (version 1 only).
        state_dict_config: torch's settings of that type of state dict.
        optim_state_dict_config: the same for optimizers.
        limit_all_gathers: version 1: wait before gathering too far ahead.
        use_orig_params: version 1: keep the original parameters (default True), so that an optimizer may be made before
            ``prepare`` and frozen parameters may be mixed with trained ones.
        param_init_fn: called with every module that has parameters on the meta device, after memory was allocated for
            them; by default ``module.reset_parameters()``.
        sync_module_states: start every rank with the weights of rank 0 (default True).
        forward_prefetch: version 1: gather the next parameters in the forward pass too.
        activation_checkpointing: compute the activations of each unit again in the backward pass.
        activation_checkpointing_offload: keep what is saved for that in CPU memory.
        cpu_ram_efficient_loading: only rank 0 holds the weights that a model is loaded with; implies
            ``sync_module_states``.
        transformer_cls_names_to_wrap: class names for "transformer_based_wrap"; by default the model's
            ``_no_split_modules``.
        min_num_params: least number of parameter elements for "size_based_wrap" (default 100,000,000).

    Raises:
        ConfigurationError: a value that is not known, or that this version of FSDP cannot use.
    """

    fsdp_version: int = None  # type: ignore[assignment]
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool = None  # type: ignore[assignment]
    activation_checkpointing: bool = None  # type: ignore[assignment]
    activation_checkpointing_offload: bool = None  # type: ignore[assignment]
    cpu_ram_efficient_loading: bool = None  # type: ignore[assignment]
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None}
        launched = FsdpOptions.from_environment()
        self._settle_version(launched)
        self._settle_sharding(launched, given)
        self._settle_wrapping(launched)
        self._settle_prefetch(launched)
        self._settle_switches(launched)
        self._settle_state_dict(launched)
        self.set_cpu_offload()
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        if self.fsdp_version == 2:
            self._refuse_settings_of_version_1(given)
            self._refuse_launched(launched, given)

    def _settle_version(self, launched: FsdpOptions) -> None:
        self.fsdp_version = int(
            one_of("fsdp_version", launched.version if self.fsdp_version is None else self.fsdp_version, ("1", "2"))
        )
        if self.fsdp_version == 2 and not _has_fully_shard():
            raise ConfigurationError(
                f"fsdp_version=2 needs torch>=2.6 (this is {torch.__version__}). Upgrade torch, or set fsdp_version=1."
            )

    def _settle_sharding(self, launched: FsdpOptions, given: set[str]) -> None:
        """Version 1 knows five strategies; version 2 one switch, to which the first two of them map."""
        asked = self.sharding_strategy if "sharding_strategy" in given else None
        if self.fsdp_version == 1:
            if isinstance(self.reshard_after_forward, bool):
                raise ConfigurationError(
                    f"reshard_after_forward={self.reshard_after_forward} is a switch of fsdp_version=2. With version "
                    "1 set "
                    'sharding_strategy="FULL_SHARD" (True) or "SHARD_GRAD_OP" (False).'
                )
            # A newer spelling puts the name of the strategy here.
            asked = self.reshard_after_forward if asked is None else asked
            self.sharding_strategy = sharding_strategy(launched.sharding_strategy if asked is None else asked)
            self.reshard_after_forward = None
            return
        if asked is not None:
            self._map_strategy(sharding_strategy(asked).name, given)
        elif self.reshard_after_forward is None:
            self._map_launched(sharding_strategy(launched.sharding_strategy).name)
        if self.reshard_after_forward is None:
            self.reshard_after_forward = launched.reshard_after_forward
        if not isinstance(self.reshard_after_forward, (bool, int)):
            self.reshard_after_forward = bool(str_to_bool(str(self.reshard_after_forward)))
        self.sharding_strategy = None

    def _map_strategy(self, name: str, given: set[str]) -> None:
        same = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
        if name not in same:
            raise ConfigurationError(
                f"sharding_strategy={name} is one of fsdp_version=1. With version 2: reshard_after_forward=True "
                "(FULL_SHARD) or False "
                "(SHARD_GRAD_OP); for a copy on each node (HYBRID_SHARD), a mesh: "
                "ParallelismConfig(dp_replicate_size=..., "
                "dp_shard_size=...); for whole models (NO_SHARD), no FSDP at all."
            )
        if "reshard_after_forward" in given and bool(self.reshard_after_forward) is not same[name]:
            raise ConfigurationError(
                f"sharding_strategy={name} means reshard_after_forward={same[name]} in fsdp_version=2, but "
                "reshard_after_forward="
                f"{self.reshard_after_forward} was given too. Drop sharding_strategy."
            )
        self.reshard_after_forward = same[name]

    def _map_launched(self, name: str) -> None:
        """A strategy that the launcher hands over; the default one says nothing about what was asked for."""
        if name != "FULL_SHARD":
            self._map_strategy(name.removeprefix("_"), set())
            logger.warning(
                "FSDP_SHARDING_STRATEGY=%s is of fsdp_version=1; with version 2 it is reshard_after_forward=%s. Set "
                "--fsdp_reshard_after_forward %s instead.",
                name,
                self.reshard_after_forward,
                str(self.reshard_after_forward).lower(),
            )

    def _settle_wrapping(self, launched: FsdpOptions) -> None:
        if self.auto_wrap_policy is None:
            self.auto_wrap_policy = launched.auto_wrap_policy
        if isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = one_of("auto_wrap_policy", self.auto_wrap_policy.lower(), wrap_policy.POLICIES)
        elif self.auto_wrap_policy is not None and not callable(self.auto_wrap_policy):
            raise ConfigurationError(
                f"auto_wrap_policy={self.auto_wrap_policy!r} is neither a policy of torch nor "
                f"{', '.join(wrap_policy.POLICIES)}."
            )
        names = self.transformer_cls_names_to_wrap
        if names is None and launched.transformer_layer_cls_to_wrap:
            names = launched.transformer_layer_cls_to_wrap.split(",")
        if names is not None:
            names = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
        self.transformer_cls_names_to_wrap = names
        if self.min_num_params is None:
            self.min_num_params = launched.min_num_params
        if self.ignored_modules is None:
            self.ignored_modules = env.read_str("FSDP_IGNORED_MODULES")

    def _settle_prefetch(self, launched: FsdpOptions) -> None:
        if self.fsdp_version == 2:
            return
        from torch.distributed.fsdp import BackwardPrefetch

        asked = launched.backward_prefetch if self.backward_prefetch is None else self.backward_prefetch
        if not isinstance(asked, BackwardPrefetch):
            names = [*BackwardPrefetch.__members__, "NO_PREFETCH"]
            name = "NO_PREFETCH" if asked is None else one_of("backward_prefetch", by_number(asked, names), names)
            asked = None if name == "NO_PREFETCH" else BackwardPrefetch[name]
        self.backward_prefetch = asked

    def _settle_switches(self, launched: FsdpOptions) -> None:
        names = [
            "activation_checkpointing",
            "activation_checkpointing_offload",
            "cpu_ram_efficient_loading",
            "sync_module_states",
        ]
        names += ["use_orig_params", "forward_prefetch"] if self.fsdp_version == 1 else []
        for name in names:
            value = getattr(self, name)
            setattr(self, name, getattr(launched, name) if value is None else bool(value))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigurationError(
                "activation_checkpointing_offload=True keeps what activation_checkpointing saves. Turn that on too."
            )
        if self.cpu_ram_efficient_loading:
            # Otherwise all ranks but the first would train on weights that nobody has read.
            self.sync_module_states = True

    def _settle_state_dict(self, launched: FsdpOptions) -> None:
        asked = launched.state_dict_type if self.state_dict_type is None else self.state_dict_type
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.set_state_dict_type(default if asked is None else asked)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how ``save_state`` writes.

        Args:
            state_dict_type: "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", its number, or torch's
                ``StateDictType``; None keeps the one there is.

        Raises:
            ConfigurationError: another value, or one that this version of FSDP has not.
        """
        from torch.distributed.fsdp import (
            FullOptimStateDictConfig,
            FullStateDictConfig,
            ShardedOptimStateDictConfig,
            ShardedStateDictConfig,
            StateDictType,
        )

        state_dict_type = self.state_dict_type if state_dict_type is None else state_dict_type
        if not isinstance(state_dict_type, StateDictType):
            names = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
            state_dict_type = StateDictType[one_of("state_dict_type", by_number(state_dict_type, names), names)]
        if state_dict_type is StateDictType.LOCAL_STATE_DICT and self.fsdp_version == 2:
            raise ConfigurationError(
                "state_dict_type=LOCAL_STATE_DICT is one of fsdp_version=1. With version 2: SHARDED_STATE_DICT, which "
                "loads on any number "
                "of ranks, or FULL_STATE_DICT."
            )
        self.state_dict_type = state_dict_type
        if state_dict_type is StateDictType.FULL_STATE_DICT:
            self.state_dict_config = self.state_dict_config or FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = self.optim_state_dict_config or FullOptimStateDictConfig(
                offload_to_cpu=True, rank0_only=True
            )
        elif state_dict_type is StateDictType.SHARDED_STATE_DICT:
            self.state_dict_config = self.state_dict_config or ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = self.optim_state_dict_config or ShardedOptimStateDictConfig(
                offload_to_cpu=True
            )

    def _refuse_settings_of_version_1(self, given: set[str]) -> None:
        for name, reason in _ONLY_VERSION_1.items():
            if (
                name in given
                and getattr(self, name) not in (False, None)
                and not (name == "use_orig_params" and self.use_orig_params)
            ):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is a setting of fsdp_version=1: {reason}. Leave it out."
                )
        if self.use_orig_params is False:
            raise ConfigurationError(
                f"use_orig_params=False is a setting of fsdp_version=1: {_ONLY_VERSION_1['use_orig_params']}. Leave "
                "it out."
            )
        if not self.limit_all_gathers:
            raise ConfigurationError(
                "limit_all_gathers=False is a setting of fsdp_version=1: version 2 always limits them. Leave it out."
            )

    def _refuse_launched(self, launched: FsdpOptions, given: set[str]) -> None:
        """Refuse what the launcher asks for and version 2 cannot do, unless the script has decided otherwise."""
        unwanted = {"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "use_orig_params": False}
        for name, value in unwanted.items():
            if getattr(launched, name) == value and name not in given:
                raise ConfigurationError(
                    f"FSDP_{name.upper()}={str(value).lower() if isinstance(value, bool) else value} (--fsdp_{name}) "
                    "is a setting of "
                    f"fsdp_version=1: {_ONLY_VERSION_1[name]}. Leave it out, or set fsdp_version=1."
                )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Turn the name of a policy into torch's policy for a model.

        Raises:
            ConfigurationError: the model has no module of a class that was named, or no classes were named.
        """
        if self.auto_wrap_policy == "transformer_based_wrap":
            self.auto_wrap_policy = wrap_policy.transformer_policy(model, self.transformer_cls_names_to_wrap)
        elif self.auto_wrap_policy == "size_based_wrap":
            self.auto_wrap_policy = wrap_policy.size_policy(int(self.min_num_params or 0))
        elif self.auto_wrap_policy == "no_wrap":
            self.auto_wrap_policy = None

    def policy_for(self, model: nn.Module) -> Any:
        """Torch's policy for a model, leaving the settings as they are for the next model."""
        if self.auto_wrap_policy == "transformer_based_wrap":
            return wrap_policy.transformer_policy(model, self.transformer_cls_names_to_wrap)
        if self.auto_wrap_policy == "size_based_wrap":
            return wrap_policy.size_policy(int(self.min_num_params or 0))
        return None if self.auto_wrap_policy == "no_wrap" else self.auto_wrap_policy

    def ignored_in(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model that stay whole.

        Raises:
            ConfigurationError: the regular expression is not one, or matches no module.
        """
        import re

        if self.ignored_modules is None:
            return []
        if not isinstance(self.ignored_modules, str):
            wanted = {id(module) for module in self.ignored_modules}
            return [module for module in model.modules() if id(module) in wanted]
        try:
            pattern = re.compile(self.ignored_modules)
        except re.error as error:
            raise ConfigurationError(
                f"ignored_modules={self.ignored_modules!r} is no regular expression: {error}."
            ) from None
        found = [module for name, module in model.named_modules() if name and pattern.fullmatch(name)]
        if not found:
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigurationError(
                f"ignored_modules={self.ignored_modules!r} matches the name of no module of {type(model).__name__}. "
                "Names are such as "
                f"{', '.join(names[:5])}."
            )
        return found

    def set_cpu_offload(self) -> None:
        """Turn a plain yes or no into torch's policy.

        Raises:
            ConfigurationError: neither a yes or no, nor a policy of this version.
        """
        if self.cpu_offload is None:
            self.cpu_offload = FsdpOptions.from_environment().offload_params
        if self.fsdp_version == 1:
            from torch.distributed.fsdp import CPUOffload

            kinds: tuple[type, ...] = (CPUOffload,)
            make = functools.partial(offload_1, bool(self.cpu_offload))
        else:
            from torch.distributed.fsdp import OffloadPolicy

            kinds = (OffloadPolicy,)
            make = functools.partial(offload_2, bool(self.cpu_offload))
        if isinstance(self.cpu_offload, bool):
            self.cpu_offload = make()
        elif not isinstance(self.cpu_offload, kinds):
            raise ConfigurationError(
                f"cpu_offload={self.cpu_offload!r} is neither True nor False nor, with "
                f"fsdp_version={self.fsdp_version}, a "
                f"{kinds[0].__name__} of torch."
            )

    def validate_cpu_offload(self) -> None:
        """Raise ConfigurationError unless ``cpu_offload`` is of a form that this version takes."""
        self.set_cpu_offload()

    def validate_mixed_precision_policy(self) -> None:
        """Raise ConfigurationError unless ``mixed_precision_policy`` is of a form that this version takes."""
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures."""
        return f"fsdp{self.fsdp_version}"

    @property
    def offloads(self) -> bool:
        """Whether parameters are kept in CPU memory."""
        if self.fsdp_version == 1:
            return bool(self.cpu_offload.offload_params)
        from torch.distributed.fsdp import CPUOffloadPolicy

        return isinstance(self.cpu_offload, CPUOffloadPolicy)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Choose what is computed, reduced and kept in which dtype.

        Args:
            mixed_precision: "bf16", "fp16" or "fp32" for everything; a dictionary of dtypes; or torch's policy.
            buffer_autocast: version 1: keep buffers in fp32.
            override: replace a policy that was given.

        Raises:
            ConfigurationError: it is none of these.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        policy = precision_class(self.fsdp_version)
        if isinstance(mixed_precision, policy):
            self.mixed_precision_policy = mixed_precision
            return
        self.mixed_precision_policy = policy(**self._dtypes(mixed_precision, buffer_autocast))

    def _dtypes(self, asked: Any, buffer_autocast: bool) -> dict[str, torch.dtype]:
        keys = _PRECISION_KEYS[self.fsdp_version]
        if isinstance(asked, str) and asked in _DTYPES:
            dtypes = dict.fromkeys(keys, _DTYPES[asked])
            return {**dtypes, "buffer_dtype": torch.float32} if buffer_autocast and "buffer_dtype" in dtypes else dtypes
        if isinstance(asked, dict) and set(asked) <= set(keys):
            dtypes = {key: _as_dtype(value) for key, value in asked.items() if value is not None}
            if all(isinstance(value, torch.dtype) for value in dtypes.values()):
                return dtypes
        raise ConfigurationError(
            f"mixed_precision_policy={asked!r} is not one of {', '.join(_DTYPES)}, nor a dictionary of "
            f"{', '.join(keys)} with dtypes such "
            f"as torch.bfloat16, nor a {precision_class(self.fsdp_version).__name__} of torch "
            f"(fsdp_version={self.fsdp_version})."
        )

    def precision_policy(self, mixed_precision: str) -> MixedPrecision | MixedPrecisionPolicy | None:
        """The policy for models of an Accelerator with this precision; None where nothing is cast."""
        if self.mixed_precision_policy is not None:
            return self.mixed_precision_policy
        # 8-bit layers compute beside bf16 ones.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(mixed_precision)
        if dtype is None:
            return None
        # Sums over many ranks lose what bf16 cannot tell apart; buffers (of rotary embeddings, say) are read by
        # autocast as they are.
        return precision_class(self.fsdp_version)(param_dtype=dtype, reduce_dtype=torch.float32)


def enable_fsdp_ram_efficient_loading() -> None:
    """Have Transformers read weights on rank 0 only, also where no launcher said so."""
    env.export(FSDP_CPU_RAM_EFFICIENT_LOADING="true", ACCELERATE_USE_FSDP="true")


def disable_fsdp_ram_efficient_loading() -> None:
    """Have every rank read its weights."""
    env.export(FSDP_CPU_RAM_EFFICIENT_LOADING="false")


def _has_fully_shard() -> bool:
    from torch.distributed import fsdp

    return hasattr(fsdp, "fully_shard")


def _as_dtype(value: Any) -> Any:
    return _DTYPES.get(value, getattr(torch, value, value)) if isinstance(value, str) else value
