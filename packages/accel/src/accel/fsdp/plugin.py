"""The settings of FSDP, given by name, by number, or as torch's own objects."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from accel_state import devices, env
from accel_state.arguments import check_flags, check_number
from accel_state.env import str_to_bool
from accel_state.errors import ArgumentTypeError, ConfigurationError, UnknownChoiceError
from accel_state.logging import warn_once
from accel_state.options import FsdpOptions
from accel_state.options import fsdp as options
from accel_state.options.fsdp_versions import RESHARD_OF_STRATEGY, UNSUPPORTED, WITHOUT_EFFECT

from .._torch_compat import hybrid_shard_zero2
from . import wrap_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

logger: Final = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "no": torch.float32}
_PRECISION_KEYS = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return the value in upper case, given by name or by its position counted from 1."""
    names = list(allowed)
    text = str(getattr(value, "name", value)).strip()
    index = int(text) - 1 if text.isdigit() else -1
    chosen = names[index] if 0 <= index < len(names) else text.upper()
    if chosen not in names:
        raise UnknownChoiceError(f"{name}={value!r} is not one of {', '.join(names)}.")
    return chosen


def _sharding_strategy(value: Any) -> Any:
    from torch.distributed.fsdp import ShardingStrategy

    if isinstance(value, ShardingStrategy):
        return value
    name = _one_of("sharding_strategy", value, options.SHARDING_STRATEGIES)
    return hybrid_shard_zero2() if name == "HYBRID_SHARD_ZERO2" else ShardingStrategy[name]


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded over the ranks.
    A field that is left out takes the launcher's value (``--fsdp_...``, ``fsdp_config`` or an ``FSDP_...`` variable),
    or the default given here.

    Args:
        fsdp_version: 1 for torch's ``FullyShardedDataParallel`` (default), 2 for ``fully_shard``.
        sharding_strategy: version 1: "FULL_SHARD" (default), "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or
            "HYBRID_SHARD_ZERO2", its number (1 to 5), or torch's ``ShardingStrategy``.
        reshard_after_forward: version 2: free gathered parameters after the forward pass (default True). With version 1
            the name or value of a sharding strategy, as in ``sharding_strategy``.
        backward_prefetch: version 1: "BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH" (default).
        mixed_precision_policy: "bf16" or "fp16" for all dtypes; a dictionary of ``param_dtype``, ``reduce_dtype`` and
            ``buffer_dtype`` (version 2: ``output_dtype``); or torch's own policy. By default the Accelerator's mixed
            precision for parameters, with gradients reduced in fp32.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap" (default), or a policy of torch.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory; or torch's own policy.
        ignored_modules: modules that are not sharded; or a regular expression that matches their full names.
        state_dict_type: how ``save_state`` writes: "FULL_STATE_DICT" (default of version 1), "SHARDED_STATE_DICT"
            (default of version 2) or "LOCAL_STATE_DICT" (version 1 only).
        sharded_state_format: how "SHARDED_STATE_DICT" writes weights: "dcp" (default), in the format of
            torch.distributed.checkpoint, or "safetensors", whole tensors in files that ``from_pretrained`` reads.
        state_dict_config: torch's settings of that type of state dict.
        optim_state_dict_config: the same for optimizers.
        limit_all_gathers: version 1: limit how far ahead parameters are gathered.
        use_orig_params: version 1: keep the original parameters (default True), so that an optimizer may be created
            before ``prepare`` and frozen parameters may be mixed with trainable ones.
        param_init_fn: called with every module that has parameters on the meta device, after their memory was
            allocated; by default ``module.reset_parameters()``.
        sync_module_states: start every rank with the weights of rank 0 (default True).
        forward_prefetch: version 1: gather the next parameters in the forward pass too.
        activation_checkpointing: recompute the activations of each unit in the backward pass.
        activation_checkpointing_mode: recompute all of a unit ("full", default), or all except for matrix products,
            convolutions and attention, whose results are kept ("selective"). With tensor parallelism: all except for
            sums over its ranks ("sums"), or for these and gathered inputs ("collectives").
        activation_checkpointing_every: checkpoint one of so many units, beginning with the first (default 1: all).
        activation_checkpointing_offload: keep the inputs saved for that in CPU memory.
        cpu_ram_efficient_loading: only rank 0 loads the weights; implies ``sync_module_states``.
        transformer_cls_names_to_wrap: class names for "transformer_based_wrap"; by default the model's
            ``_no_split_modules``.
        min_num_params: smallest number of parameter elements for "size_based_wrap" (default 100,000,000).
        forward_methods: names of methods that use parameters and are called without ``forward``, besides ``generate``
            and ``encode``: of the model or its units ("embed"), or of a submodule ("text_model.embed").

    Raises:
        ConfigurationError: an unknown value, or one that this version of FSDP does not support.

    Examples:
        >>> plugin = FullyShardedDataParallelPlugin(
        ...     fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
        ... )
        >>> plugin.fsdp_version
        2
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
    sharded_state_format: str = None  # type: ignore[assignment]
    activation_checkpointing_mode: str = None  # type: ignore[assignment]
    activation_checkpointing_every: int = None  # type: ignore[assignment]
    forward_methods: Iterable[str] = ()

    def __post_init__(self) -> None:
        check_flags(self)
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None}
        launched = FsdpOptions.from_environment()
        version = launched.version if self.fsdp_version is None else self.fsdp_version
        if str(version) not in ("1", "2"):
            raise ConfigurationError(f"fsdp_version={version!r} is not one of 1, 2.")
        self.fsdp_version = int(version)
        self._set_sharding(launched, given)
        self._set_wrapping(launched)
        self._set_prefetch(launched)
        self._set_switches(launched)
        self._set_checkpointing(launched)
        if isinstance(self.forward_methods, str):
            raise ConfigurationError(
                f"forward_methods={self.forward_methods!r} must be a list of names, such as [{self.forward_methods!r}]."
            )
        shard_format = self.sharded_state_format or launched.sharded_state_format
        allowed = map(str.upper, options.SHARD_FORMATS)
        self.sharded_state_format = _one_of("sharded_state_format", shard_format, allowed).lower()
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.set_state_dict_type(self.state_dict_type or launched.state_dict_type or default)
        self.set_cpu_offload()
        self.validate_mixed_precision_policy()
        if self.fsdp_version == 2:
            self._warn_about_version_1(launched, given)

    def _set_sharding(self, launched: FsdpOptions, given: set[str]) -> None:
        """Version 1 has five strategies; version 2 one switch, to which the first two of them map."""
        strategy = self.sharding_strategy if "sharding_strategy" in given else None
        if self.fsdp_version == 1:
            if isinstance(self.reshard_after_forward, bool):
                raise ConfigurationError(
                    f"reshard_after_forward={self.reshard_after_forward} is a setting of fsdp_version=2. With version "
                    '1 set sharding_strategy="FULL_SHARD" (True) or "SHARD_GRAD_OP" (False).'
                )
            # Newer configurations give the name of the strategy here.
            strategy = self.reshard_after_forward if strategy is None else strategy
            self.sharding_strategy = _sharding_strategy(launched.sharding_strategy if strategy is None else strategy)
            self.reshard_after_forward = None
            if not launched.reshard_after_forward and self.sharding_strategy.name == "FULL_SHARD":
                warn_once(
                    __name__,
                    "FSDP_RESHARD_AFTER_FORWARD=false (--fsdp_reshard_after_forward) has no effect with "
                    "fsdp_version=1. Set --fsdp_version 2, or --fsdp_sharding_strategy SHARD_GRAD_OP.",
                )
            return
        if strategy is not None:
            self._map_strategy(_sharding_strategy(strategy).name.removeprefix("_"), given)
        elif self.reshard_after_forward is None and launched.sharding_strategy != "FULL_SHARD":
            # The launcher always sets the variable, so its default does not count as a choice.
            self._map_strategy(_sharding_strategy(launched.sharding_strategy).name.removeprefix("_"), set())
            logger.warning(
                "FSDP_SHARDING_STRATEGY=%s is of fsdp_version=1; with version 2 it is reshard_after_forward=%s. Set "
                "--fsdp_reshard_after_forward %s instead.",
                launched.sharding_strategy,
                self.reshard_after_forward,
                str(self.reshard_after_forward).lower(),
            )
        if self.reshard_after_forward is None:
            self.reshard_after_forward = launched.reshard_after_forward
        if not isinstance(self.reshard_after_forward, (bool, int)):
            self.reshard_after_forward = bool(str_to_bool(str(self.reshard_after_forward)))
        self.sharding_strategy = None

    def _map_strategy(self, name: str, given: set[str]) -> None:
        self._check_supported("sharding_strategy", name)
        equivalent = RESHARD_OF_STRATEGY[name]
        if "reshard_after_forward" in given and bool(self.reshard_after_forward) is not equivalent:
            raise ConfigurationError(
                f"sharding_strategy={name} means reshard_after_forward={equivalent} with fsdp_version=2, but "
                f"reshard_after_forward={self.reshard_after_forward} was given too. Drop sharding_strategy."
            )
        self.reshard_after_forward = equivalent

    def _check_supported(self, name: str, value: str) -> None:
        instead = UNSUPPORTED.get((name, value))
        if instead is not None and self.fsdp_version == 2:
            raise ConfigurationError(f"{name}={value} requires fsdp_version=1. Leave it out: version 2 {instead}.")

    def _set_wrapping(self, launched: FsdpOptions) -> None:
        policy = launched.auto_wrap_policy if self.auto_wrap_policy is None else self.auto_wrap_policy
        if isinstance(policy, str):
            policy = _one_of("auto_wrap_policy", policy, options.WRAP_POLICIES).lower()
        elif policy is not None and not callable(policy):
            raise ConfigurationError(
                f"auto_wrap_policy={policy!r} is neither a policy of torch nor one of "
                f"{', '.join(options.WRAP_POLICIES).lower()}."
            )
        self.auto_wrap_policy = policy
        names = self.transformer_cls_names_to_wrap
        if names is None:
            names = launched.transformer_layer_cls_to_wrap or None  # type: ignore[assignment]
        if names is not None:
            names = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
        self.transformer_cls_names_to_wrap = names
        if names is not None and policy != "transformer_based_wrap":
            warn_once(
                __name__,
                f"transformer_cls_names_to_wrap={names} (--fsdp_transformer_layer_cls_to_wrap) has no effect with "
                f"auto_wrap_policy={policy!r}. Set auto_wrap_policy='transformer_based_wrap' "
                "(--fsdp_auto_wrap_policy), or leave the names out.",
            )
        if self.min_num_params is None:
            self.min_num_params = launched.min_num_params
        given: Any = self.min_num_params
        if isinstance(given, float) and given.is_integer():
            self.min_num_params = given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            raise ArgumentTypeError(
                f"min_num_params={self.min_num_params!r} must be an integer: a number of parameter elements, such as "
                "100_000_000."
            )
        check_number("min_num_params", given, at_least=0, whole=True)
        if self.ignored_modules is None:
            self.ignored_modules = launched.ignored_modules

    def _set_prefetch(self, launched: FsdpOptions) -> None:
        if self.fsdp_version == 2:
            return
        from torch.distributed.fsdp import BackwardPrefetch

        value = launched.backward_prefetch if self.backward_prefetch is None else self.backward_prefetch
        if not isinstance(value, BackwardPrefetch):
            name = "NO_PREFETCH" if value is None else _one_of("backward_prefetch", value, options.PREFETCH_POLICIES)
            value = None if name == "NO_PREFETCH" else BackwardPrefetch[name]
        self.backward_prefetch = value

    def _set_switches(self, launched: FsdpOptions) -> None:
        names = ["activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"]
        names += ["sync_module_states"]
        names += ["use_orig_params", "forward_prefetch"] if self.fsdp_version == 1 else []
        for name in names:
            value = getattr(self, name)
            setattr(self, name, getattr(launched, name) if value is None else bool(value))
        if self.cpu_ram_efficient_loading:
            # The other ranks have not loaded any weights.
            self.sync_module_states = True

    def _set_checkpointing(self, launched: FsdpOptions) -> None:
        mode = self.activation_checkpointing_mode or launched.activation_checkpointing_mode
        allowed = map(str.upper, (*options.CHECKPOINTING_MODES, *options.TENSOR_PARALLEL_MODES))
        self.activation_checkpointing_mode = _one_of("activation_checkpointing_mode", mode, allowed).lower()
        if self.activation_checkpointing_every is None:
            self.activation_checkpointing_every = launched.activation_checkpointing_every
        every = self.activation_checkpointing_every
        check_number("activation_checkpointing_every", every, at_least=1, whole=True)
        if not self.activation_checkpointing:
            used = {"activation_checkpointing_offload": False, "activation_checkpointing_mode": "full"}
            for name, unused in {**used, "activation_checkpointing_every": 1}.items():
                if getattr(self, name) != unused:
                    raise ConfigurationError(
                        f"{name}={getattr(self, name)!r} needs activation_checkpointing=True. Set both, or neither."
                    )
        elif self.activation_checkpointing_offload and self.activation_checkpointing_mode == "selective":
            raise ConfigurationError(
                "activation_checkpointing_offload=True moves the inputs of checkpointed units to the CPU, and not the "
                "results that activation_checkpointing_mode='selective' keeps. Leave one of them out."
            )

    def _warn_about_version_1(self, launched: FsdpOptions, given: set[str]) -> None:
        """Warn about settings of version 1 without an effect, unless the script overrides those of the launcher."""
        for name, (unsupported, reason) in WITHOUT_EFFECT.items():
            value = getattr(self, name)
            value = getattr(value, "name", value)
            if name in given and value == unsupported:
                warn_once(__name__, f"{name}={value!r} has no effect with fsdp_version=2, which {reason}.")
            if name not in given and getattr(launched, name, None) == unsupported:
                text = str(unsupported).lower() if isinstance(unsupported, bool) else unsupported
                warn_once(__name__, f"FSDP_{name.upper()}={text} has no effect with fsdp_version=2, which {reason}.")

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Choose how ``save_state`` writes.

        Args:
            state_dict_type: "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", its number, or torch's
                ``StateDictType``; None keeps the current one.

        Raises:
            ConfigurationError: another value, or one that this version of FSDP does not support.
        """
        from torch.distributed import fsdp

        kind = self.state_dict_type if state_dict_type is None else state_dict_type
        if not isinstance(kind, fsdp.StateDictType):
            kind = fsdp.StateDictType[_one_of("state_dict_type", kind, options.STATE_DICT_TYPES)]
        self._check_supported("state_dict_type", kind.name)
        if self.sharded_state_format == "safetensors" and kind.name != "SHARDED_STATE_DICT":
            raise ConfigurationError(
                f"sharded_state_format='safetensors' is a format of SHARDED_STATE_DICT, not of {kind.name}. Set "
                "state_dict_type='SHARDED_STATE_DICT', or leave sharded_state_format out."
            )
        self.state_dict_type = kind
        if kind is fsdp.StateDictType.FULL_STATE_DICT:
            settings = {"offload_to_cpu": True, "rank0_only": True}
            self.state_dict_config = self.state_dict_config or fsdp.FullStateDictConfig(**settings)
            self.optim_state_dict_config = self.optim_state_dict_config or fsdp.FullOptimStateDictConfig(**settings)
        elif kind is fsdp.StateDictType.SHARDED_STATE_DICT:
            self.state_dict_config = self.state_dict_config or fsdp.ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = self.optim_state_dict_config or fsdp.ShardedOptimStateDictConfig(
                offload_to_cpu=True
            )

    def policy_for(self, model: nn.Module) -> Any:
        """Torch's wrap policy for a model, without changing the settings.

        Raises:
            ConfigurationError: the model has no module of a named class, or no classes were named.
        """
        if self.auto_wrap_policy == "transformer_based_wrap":
            return wrap_policy.transformer_policy(model, self.transformer_cls_names_to_wrap)
        if self.auto_wrap_policy == "size_based_wrap":
            from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

            return partial(size_based_auto_wrap_policy, min_num_params=int(self.min_num_params or 0))
        return None if self.auto_wrap_policy == "no_wrap" else self.auto_wrap_policy

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace the name of a policy by torch's policy for a model; raises like :meth:`policy_for`."""
        self.auto_wrap_policy = self.policy_for(model)

    def ignored_in(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of a model that are not sharded.

        Raises:
            ConfigurationError: the regular expression is invalid.
        """
        if self.ignored_modules is None:
            return []
        if not isinstance(self.ignored_modules, str):
            ignored = {id(module) for module in self.ignored_modules}
            return [module for module in model.modules() if id(module) in ignored]
        try:
            pattern = re.compile(self.ignored_modules)
        except re.error as error:
            raise ConfigurationError(
                f"ignored_modules={self.ignored_modules!r} is not a valid regular expression: {error}."
            ) from None
        named = {name: module for name, module in model.named_modules() if name}
        matching = [module for name, module in named.items() if pattern.fullmatch(name)]
        if not matching:
            warn_once(
                __name__,
                f"ignored_modules={self.ignored_modules!r} matches no module of {type(model).__name__}, so all are "
                f"sharded. Its modules have names such as {', '.join(list(named)[:5])}.",
            )
        return matching

    def set_cpu_offload(self) -> None:
        """Replace True or False in ``cpu_offload`` by torch's policy.

        Raises:
            ConfigurationError: neither a bool nor a policy of this version.
        """
        from torch.distributed import fsdp

        if self.cpu_offload is None:
            self.cpu_offload = FsdpOptions.from_environment().offload_params
        policy: type = fsdp.CPUOffload if self.fsdp_version == 1 else fsdp.OffloadPolicy
        if isinstance(self.cpu_offload, policy):
            return
        if not isinstance(self.cpu_offload, bool):
            raise ConfigurationError(
                f"cpu_offload={self.cpu_offload!r} must be True, False or, with fsdp_version={self.fsdp_version}, a "
                f"torch.distributed.fsdp.{policy.__name__}."
            )
        if self.fsdp_version == 1:
            self.cpu_offload = fsdp.CPUOffload(offload_params=self.cpu_offload)
        elif self.cpu_offload:
            # Pinned memory needs an accelerator.
            self.cpu_offload = fsdp.CPUOffloadPolicy(pin_memory=devices.detect().name != "cpu")
        else:
            self.cpu_offload = fsdp.OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise ConfigurationError unless this version supports the value of ``cpu_offload``."""
        self.set_cpu_offload()

    def validate_mixed_precision_policy(self) -> None:
        """Raise ConfigurationError unless this version supports the value of ``mixed_precision_policy``."""
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures."""
        return f"fsdp{self.fsdp_version}"

    @property
    def offloads(self) -> bool:
        """True if parameters are kept in CPU memory."""
        if self.fsdp_version == 1:
            return bool(self.cpu_offload.offload_params)
        from torch.distributed.fsdp import CPUOffloadPolicy

        return isinstance(self.cpu_offload, CPUOffloadPolicy)

    @property
    def _precision_class(self) -> Any:
        from torch.distributed import fsdp

        return fsdp.MixedPrecision if self.fsdp_version == 1 else fsdp.MixedPrecisionPolicy

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Choose the dtypes of computation, reduction and buffers or outputs.

        Args:
            mixed_precision: "bf16", "fp16" or "fp32" for all of them; a dictionary of dtypes; or torch's policy.
            buffer_autocast: version 1: keep buffers in fp32.
            override: replace a policy that was given.

        Raises:
            ConfigurationError: another value.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        policy = self._precision_class
        if not isinstance(mixed_precision, policy):
            mixed_precision = policy(**self._dtypes(mixed_precision, buffer_autocast))
        self.mixed_precision_policy = mixed_precision

    def _dtypes(self, value: Any, buffer_autocast: bool) -> dict[str, torch.dtype]:
        keys = _PRECISION_KEYS[self.fsdp_version]
        if isinstance(value, str) and value in _DTYPES:
            dtypes = dict.fromkeys(keys, _DTYPES[value])
            if buffer_autocast and "buffer_dtype" in dtypes:
                dtypes["buffer_dtype"] = torch.float32
            return dtypes
        if isinstance(value, dict) and set(value) <= set(keys):
            dtypes = {key: dtype for key, dtype in value.items() if dtype is not None}
            for key, name in dtypes.items():
                if isinstance(name, str):
                    dtypes[key] = _DTYPES.get(name, getattr(torch, name, name))
            if all(isinstance(dtype, torch.dtype) for dtype in dtypes.values()):
                return dtypes
        raise ConfigurationError(
            f"mixed_precision_policy={value!r} is not one of {', '.join(_DTYPES)}, nor a dictionary of "
            f"{', '.join(keys)} with dtypes such as torch.bfloat16, nor a {self._precision_class.__name__} of torch "
            f"(fsdp_version={self.fsdp_version})."
        )

    def precision_policy(self, mixed_precision: str) -> MixedPrecision | MixedPrecisionPolicy | None:
        """Return the policy for an Accelerator of this precision; None if nothing is cast."""
        if self.mixed_precision_policy is not None:
            return self.mixed_precision_policy
        # Around 8-bit layers, operations compute in bf16.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(mixed_precision)
        if dtype is None:
            return None
        # Sums over many ranks lose precision in bf16. Buffers (of rotary embeddings, say) stay as they are: autocast
        # reads them.
        return self._precision_class(param_dtype=dtype, reduce_dtype=torch.float32)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make Transformers load weights on rank 0 only, even if the launcher did not ask for it."""
    env.export(FSDP_CPU_RAM_EFFICIENT_LOADING="true", ACCELERATE_USE_FSDP="true")


def disable_fsdp_ram_efficient_loading() -> None:
    """Make every rank load its weights."""
    env.export(FSDP_CPU_RAM_EFFICIENT_LOADING="false")
