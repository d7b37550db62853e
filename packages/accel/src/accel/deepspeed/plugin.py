"""DeepSpeedPlugin: the settings of a training with DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from accel_state import AcceleratorState, PartialState, get_logger, is_initialized
from accel_state.errors import ConfigurationError, require
from accel_state.options import DeepSpeedOptions
from accel_state.options.deepspeed import FILE_PATHS

from . import auto_values, runtime, validation
from . import config as ds_config
from .config import HfDeepSpeedConfig, PreparedFacts, explicit_setting
from .config_paths import AUTO, copy_config, get_value, leaf_paths

logger: Final = get_logger(__name__)


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains.

    A field that is left out takes the launcher's value (``--zero_stage``, ``deepspeed_config`` or an
    ``ACCELERATE_DEEPSPEED_...`` variable), or else its default. A DeepSpeed configuration (JSON) may contain the same
    settings; it is an error if they differ. After construction, the fields show the resulting values.

    Args:
        hf_ds_config: a DeepSpeed configuration: the path of a JSON file, a dictionary, JSON in base64, or an object
            with a dictionary as its ``config``.
        gradient_accumulation_steps: micro batches per optimizer step (default: the Accelerator's).
        gradient_clipping: maximum gradient norm (default: no clipping).
        zero_stage: what is sharded over the processes: 0 nothing, 1 optimizer states, 2 also gradients (default),
            3 also parameters.
        is_train_batch_min: if several loaders are prepared together, use the smallest batch size as the micro batch
            rather than the largest.
        offload_optimizer_device: "none" (default), "cpu" or "nvme"; stage 1 and above.
        offload_param_device: the same for parameters; stage 3 only.
        offload_optimizer_nvme_path: directory on an NVMe drive for optimizer states.
        offload_param_nvme_path: the same for parameters.
        zero3_init_flag: have Transformers create models sharded, with ``deepspeed.zero.Init`` (default: at stage 3).
        zero3_save_16bit_model: gather 16-bit weights when a model is saved; stage 3 only.
        transformer_moe_cls_names: comma-separated class names of mixture-of-experts layers whose parameters are
            gathered together; stage 3 only.
        enable_msamp: MS-AMP's DeepSpeed engine, which is no longer available.
        msamp_opt_level: "O1" or "O2".

    Attributes:
        deepspeed_config: the configuration; "auto" values are filled in when a model is prepared.

    Raises:
        ConfigurationError: a value is not allowed, or two places contradict each other; the message names both.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int = None  # type: ignore[assignment]
    gradient_clipping: float = None  # type: ignore[assignment]
    zero_stage: int = None  # type: ignore[assignment]
    is_train_batch_min: bool = True
    offload_optimizer_device: str = None  # type: ignore[assignment]
    offload_param_device: str = None  # type: ignore[assignment]
    offload_optimizer_nvme_path: str = None  # type: ignore[assignment]
    offload_param_nvme_path: str = None  # type: ignore[assignment]
    zero3_init_flag: bool = None  # type: ignore[assignment]
    zero3_save_16bit_model: bool = None  # type: ignore[assignment]
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool = None  # type: ignore[assignment]
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False)

    strategy = "deepspeed"

    def __post_init__(self) -> None:
        self._selected = False
        self.dschf: HfDeepSpeedConfig | None = None
        # Logged when the plugin is selected: no rank is known yet, so every process would log them.
        self._pending_logs: list[tuple[int, str]] = []
        self.msamp_opt_level = self.msamp_opt_level or "O1"
        if self.msamp_opt_level not in ("O1", "O2"):
            raise ConfigurationError(f"msamp_opt_level={self.msamp_opt_level!r} is not one of O1, O2.")
        if self.enable_msamp:
            raise ConfigurationError(
                "enable_msamp=True: MS-AMP's DeepSpeed engine requires a DeepSpeed release of 2023 and is no longer "
                'available. Leave it out; Accelerator(mixed_precision="fp8") trains in 8 bits without DeepSpeed.'
            )
        self.enable_msamp = False
        launcher_file = DeepSpeedOptions.from_environment().config_file
        source = ds_config.read_config(self.hf_ds_config, launcher_file)
        self._name = source.name
        if self.hf_ds_config is not None and launcher_file is not None:
            text = f"{self._name} of the script overrides {launcher_file} of the launcher."
            self._pending_logs.append((logging.WARNING, text))
        fields = {name: explicit_setting(name, getattr(self, name)) for name in FILE_PATHS}
        for name, setting in fields.items():
            launched = explicit_setting(name, None)
            if setting is None or launched is None or setting.value == launched.value:
                continue
            if name != validation.COUNTS[2]:  # the strategy compares numbers of accumulation steps
                text = f"{setting.source} overrides {launched.source}. Give the value in one of them."
                self._pending_logs.append((logging.WARNING, text))
        config = source.config
        ds_config.merge_settings(config, source, {name: value for name, value in fields.items() if value is not None})
        validation.check_config(config, self._name)
        self._pending_logs += [(logging.WARNING, text) for text in validation.turn_off_unused(config, self._name)]
        self.deepspeed_config = config
        if not isinstance(getattr(self.hf_ds_config, "config", None), dict):
            self.hf_ds_config = HfDeepSpeedConfig(config)
            self.hf_ds_config.config = config
        self._filled, self._filled_precision = ds_config.FilledValues(), ds_config.FilledValues()
        self._update_fields()

        init = explicit_setting("zero3_init_flag", self.zero3_init_flag)
        if init is not None and init.value and self.zero_stage != 3:
            # `accel config` writes it for every stage.
            level = logging.INFO if init.by_launcher else logging.WARNING
            text = f"{init.source} has no effect with ZeRO stage {self.zero_stage}: it requires stage 3."
            self._pending_logs.append((level, text))
        self.zero3_init_flag = self.zero_stage == 3 and (init is None or bool(init.value))
        leaf_classes = explicit_setting("transformer_moe_cls_names", self.transformer_moe_cls_names)
        if leaf_classes is not None and not leaf_classes.by_launcher and self.zero_stage != 3:
            text = f"{leaf_classes.source} has no effect with ZeRO stage {self.zero_stage}: it requires stage 3."
            self._pending_logs.append((logging.WARNING, text))
        self.transformer_moe_cls_names = leaf_classes.value if leaf_classes is not None else None
        if config.get(validation.COUNTS[2]) is None:
            # Callers read the key. As a filled value it does not override the Accelerator's number of steps.
            self._filled.fill(config, copy_config(config), {validation.COUNTS[2]: 1})

    def __getstate__(self) -> dict[str, Any]:
        # Values of built-in types only: Accelerate, which does not have the class, loads a Trainer's training_args.bin.
        return {**self.__dict__, "_filled": vars(self._filled), "_filled_precision": vars(self._filled_precision)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._filled, self._filled_precision = ds_config.FilledValues(), ds_config.FilledValues()
        vars(self._filled).update(state.get("_filled", {}))
        vars(self._filled_precision).update(state.get("_filled_precision", {}))

    def _update_fields(self) -> None:
        missing = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "zero3_save_16bit_model": False}
        for name, path in FILE_PATHS.items():
            value = get_value(self.deepspeed_config, path)
            setattr(self, name, missing.get(name, "none") if value is None else value)

    @property
    def accumulation_steps(self) -> int | None:
        """Micro batches per optimizer step set by the configuration; None leaves it to the Accelerator."""
        config = self._filled.revert(self.deepspeed_config)
        train, micro, steps = (config.get(key) for key in validation.COUNTS)
        if steps is None and isinstance(train, int) and isinstance(micro, int) and is_initialized():
            # DeepSpeed derives a missing value the same way.
            return max(train // (micro * PartialState().num_processes), 1)
        return steps if isinstance(steps, int) else None

    @property
    def precision(self) -> str | None:
        """The precision that the configuration enables ("fp16" or "bf16"); None leaves it to the Accelerator."""
        return ds_config.enabled_precision(self._filled_precision.revert(self.deepspeed_config))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enable the Accelerator's precision unless the configuration sets one."""
        original = self._filled_precision.revert(self.deepspeed_config)
        resolved = copy_config(original)
        ds_config.apply_mixed_precision(resolved, mixed_precision, self._name)
        self._filled_precision.fill(self.deepspeed_config, original, resolved)

    def resolve(self, facts: PreparedFacts) -> dict[str, Any]:
        """Build the configuration of an engine, without "auto"."""
        config = self._filled.revert(self.deepspeed_config)
        validation.check_section_types(config, self._name)
        original = copy_config(config)
        ds_config.apply_mixed_precision(config, facts.mixed_precision, self._name)
        if facts.known_micro_batch_size is None:
            plugins = AcceleratorState._shared_state.get("plugins", {}).get("deepspeed")
            others = [plugin for plugin in plugins.values() if plugin is not self] if isinstance(plugins, dict) else []
            sizes = [plugin.deepspeed_config.get(validation.COUNTS[1]) for plugin in others]
            known = min((size for size in sizes if isinstance(size, int)), default=None)
            facts = replace(facts, known_micro_batch_size=known)
        auto_values.fill_auto(config, facts, self._name, self.is_train_batch_min)
        validation.check_config(config, self._name)
        for text in validation.turn_off_unused(config, self._name):
            logger.warning_once(text)
        validation.check_resolved(config, self._name, facts.world_size)
        self._filled.fill(self.deepspeed_config, original, config)
        self._update_fields()
        return config

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if the value of a dotted key is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key in ``deepspeed_config``."""
        return get_value(self.deepspeed_config, ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace an "auto" value by the value of the same dotted key in ``kwargs``, or compare the two.

        Args:
            ds_key_long: the dotted key.
            mismatches: receives a line if the values differ.
            must_match: compare values that are not "auto".
            **kwargs: values by dotted key.

        Raises:
            ConfigurationError: the value is "auto", and ``kwargs`` does not contain it.
        """
        lines: list[str] = [] if mismatches is None else mismatches
        ds_config.fill_or_compare(self.deepspeed_config, ds_key_long, lines, must_match, kwargs)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace all "auto" values by the values of the same dotted keys in ``kwargs``, and compare the others.

        Args:
            prefix: dotted path of ``config``.
            mismatches: receives a line for each difference; if left out, differences raise.
            config: a section (default: the whole configuration).
            must_match: compare values that are not "auto".
            **kwargs: values by dotted key.

        Raises:
            ConfigurationError: an "auto" without a value in ``kwargs``, or a difference.
        """
        lines: list[str] = [] if mismatches is None else mismatches
        section = self.deepspeed_config if config is None else config
        for path in list(leaf_paths(section, prefix.rstrip("."))):
            ds_config.fill_or_compare(self.deepspeed_config, path, lines, must_match, kwargs)
        if mismatches is None and lines:
            differences = "\n".join(lines)
            raise ConfigurationError(
                f"the DeepSpeed configuration and the script differ:\n{differences}\n"
                'Correct one of them, or write "auto" in the configuration.'
            )

    @property
    def selected(self) -> bool:
        """True if the next model is prepared with this plugin."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise ConfigurationError(
            f"selected={value!r} cannot be set. Call accelerator.state.select_deepspeed_plugin(name)."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Run by ``accelerator.state.select_deepspeed_plugin(name)``."""
        if not _from_accelerator_state:
            raise ConfigurationError(
                "a plugin is selected by its name: call accelerator.state.select_deepspeed_plugin(name)."
            )
        self._selected = True
        self.set_deepspeed_weakref()
        while self._pending_logs:
            logger.log(*self._pending_logs.pop(0))

    def unselect(self) -> None:
        """Have another plugin prepare models."""
        self._selected = False
        self.release()

    def release(self) -> None:
        """Have Transformers create unsharded models again; called at the end of training."""
        if self.dschf is not None:
            self.dschf = None
            runtime.disable_sharded_init()

    def is_zero3_init_enabled(self) -> bool:
        """Return True if Transformers creates sharded models while this plugin is selected."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Have Transformers create sharded (``enable``) or unsharded models in the block."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Give Transformers the configuration, by which it creates sharded models at stage 3.

        It holds a weak reference to this plugin's config. At stage 3 with ``zero3_init_flag=False`` it gets none.
        """
        self.dschf = None
        if self.zero_stage != 3:
            self.dschf = runtime.publish_config(self.deepspeed_config)
        elif self.zero3_init_flag:
            self.dschf = runtime.enable_sharded_init(self.deepspeed_config)
        else:
            runtime.disable_sharded_init()

    @property
    def config(self) -> dict[str, Any]:
        """A copy without "auto" for ``deepspeed.zero.Init(config_dict_or_path=...)``."""
        return runtime.sharded_init_config(self.deepspeed_config)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Have stage 3 gather each mixture-of-experts layer at once: the experts that run depend on the rank's data.

        Raises:
            ConfigurationError: the model has no module of a class in ``transformer_moe_cls_names``.
            MissingDependencyError: DeepSpeed is not installed.
        """
        if self.zero_stage != 3 or not self.transformer_moe_cls_names:
            return
        classes: dict[str, type[Any]] = {type(module).__name__: type(module) for module in model.modules()}
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",") if name.strip()]
        for name in names:
            if name not in classes:
                raise ConfigurationError(
                    f"transformer_moe_cls_names={self.transformer_moe_cls_names!r}: {type(model).__name__} has no "
                    f"module of class {name}. Its classes: {', '.join(sorted(classes))}."
                )
        utils = require("deepspeed.utils", purpose="ZeRO stage 3", install="accel[deepspeed]")
        utils.set_z3_leaf_modules(model, [classes[name] for name in names])
