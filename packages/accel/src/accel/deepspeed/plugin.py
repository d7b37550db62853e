"""The settings of DeepSpeed.

What the engine half of accel.deepspeed asks of a plugin:

- ``plugin.strategy``: "deepspeed".
- ``plugin.deepspeed_config``: the configuration as far as it is known, with "auto" in the rest.
- ``plugin.resolve(facts) -> dict``: at prepare(), with a ``facts.PreparedFacts``: a new, complete dictionary for
  ``deepspeed.initialize(config=...)``; raises ConfigurationError for whatever cannot be. The plugin's own
  ``deepspeed_config`` then shows the values that were filled in, and the next ``resolve`` fills them anew (another
  model has another hidden size), unless the script has changed them meanwhile.
- ``plugin.accumulation_steps`` and ``plugin.precision``: what the configuration itself says, or None: they win over the
  Accelerator's.
- ``plugin.selected``, ``select(_from_accelerator_state=True)``, ``_unselect()``: for a dictionary of plugins.
- ``plugin.set_moe_leaf_modules(model)`` before ``deepspeed.initialize`` at stage 3.
- dummies.DummyOptim and dummies.DummyScheduler; ``resolve`` refuses combinations with the configuration that cannot
  work, so that afterwards: a DummyOptim means that "optimizer" is in the dictionary; a DummyScheduler means that
  "scheduler" is, or that it has an ``lr_scheduler_callable``. A model that comes without optimizer and scheduler has
  neither section in its dictionary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from accel_state import PartialState, get_logger
from accel_state.errors import ConfigurationError
from accel_state.options import DeepSpeedOptions
from accel_state.options.deepspeed import FILE_PATHS

from . import auto_values, runtime, validation
from . import config as ds_config
from .config import Given, HfDeepSpeedConfig, PreparedFacts, given, merge, read, template
from .config_paths import AUTO, copied, get
from .runtime import micro_batch_of_others

logger = get_logger(__name__)


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains.

    A field that is left out takes the launcher's value (``--zero_stage``, ``deepspeed_config`` or an
    ``ACCELERATE_DEEPSPEED_...`` variable), and else the default that stands here. A DeepSpeed configuration (JSON) may
    have the same settings; where both have one, and they differ, that is an error. Afterwards the fields say what was
    settled on.

    Args:
        hf_ds_config: a DeepSpeed configuration: path of a JSON file, dictionary, JSON in base64, or an object with a
            dictionary as its ``config``.
        gradient_accumulation_steps: micro batches an optimizer step; by default those of the Accelerator.
        gradient_clipping: norm that gradients are clipped to; by default they are not.
        zero_stage: what is sharded over the processes: 0 nothing, 1 optimizer states, 2 gradients too (default), 3
            parameters too.
        is_train_batch_min: where several loaders are prepared together, take the smallest batch as the micro batch, not
            the largest.
        offload_optimizer_device: "none" (default), "cpu" or "nvme", from stage 1 on.
        offload_param_device: the same for parameters, with stage 3.
        offload_optimizer_nvme_path: folder on an NVMe drive.
        offload_param_nvme_path: the same for parameters.
        zero3_init_flag: have Transformers create models sharded, within ``deepspeed.zero.Init``; by default with stage
            3.
        zero3_save_16bit_model: gather 16-bit weights when a model is saved, with stage 3.
        transformer_moe_cls_names: class names of mixture-of-experts layers, separated by commas, whose parameters are
            fetched together, with stage 3.
        enable_msamp: MS-AMP's own DeepSpeed engine, which is not to be had any more.
        msamp_opt_level: its level, "O1" or "O2".

    Attributes:
        deepspeed_config: the configuration; "auto" is filled in when a model is prepared.

    Raises:
        ConfigurationError: a value that is not allowed, or two places that contradict each other; the message names
            both.
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
        # Said when the plugin is selected: where it is made, no rank is known, and every one of them would say it.
        self._notes: list[tuple[int, str]] = []
        self._refuse_msamp()
        launched = DeepSpeedOptions.from_environment()
        config, origin = read(self.hf_ds_config, launched.config_file)
        if self.hf_ds_config is not None and launched.config_file is not None:
            self._notes.append(
                (
                    logging.WARNING,
                    f"{origin.name} of the script is used, and not {launched.config_file} of the launcher.",
                )
            )
        self._name = origin.name
        settings = {name: found for name in FILE_PATHS if (found := given(name, getattr(self, name))) is not None}
        config = template() if config is None else config
        merge(config, origin, settings)
        validation.check(config, self._name)
        self.deepspeed_config = config
        if not isinstance(getattr(self.hf_ds_config, "config", None), dict):
            self.hf_ds_config = _holder(config)
        self._filling, self._precision_filling = ds_config.Filling(), ds_config.Filling()
        self._read_back()
        self._settle_zero3_init(given("zero3_init_flag", self.zero3_init_flag))
        self._settle_moe(given("transformer_moe_cls_names", self.transformer_moe_cls_names))

    def _refuse_msamp(self) -> None:
        self.msamp_opt_level = self.msamp_opt_level or "O1"
        if self.msamp_opt_level not in ("O1", "O2"):
            raise ConfigurationError(f"msamp_opt_level={self.msamp_opt_level!r} is not one of O1, O2.")
        if self.enable_msamp:
            raise ConfigurationError(
                "enable_msamp=True asks for MS-AMP's own DeepSpeed engine, which is made for a DeepSpeed of 2023 and "
                "not maintained. "
                'Leave it out; Accelerator(mixed_precision="fp8") trains in 8 bits without DeepSpeed.'
            )
        self.enable_msamp = False

    def _read_back(self) -> None:
        """Let the fields say what the configuration says."""
        missing = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "zero3_save_16bit_model": False}
        for name, path in FILE_PATHS.items():
            value = get(self.deepspeed_config, path)
            setattr(self, name, missing.get(name, "none") if value is None else value)

    def _settle_zero3_init(self, asked: Given | None) -> None:
        if asked is not None and asked.value and self.zero_stage != 3:
            # Questionnaires write it whatever the stage.
            level = logging.INFO if asked.by_launcher else logging.WARNING
            text = (
                f"{asked.source} has no effect with ZeRO stage {self.zero_stage}: only stage 3 creates models sharded."
            )
            self._notes.append((level, text))
        self.zero3_init_flag = self.zero_stage == 3 and (asked is None or bool(asked.value))

    def _settle_moe(self, asked: Given | None) -> None:
        if asked is not None and not asked.by_launcher and self.zero_stage != 3:
            raise ConfigurationError(
                f"{asked.source} says which modules ZeRO stage 3 fetches as a whole, but the stage is "
                f"{self.zero_stage}. Leave it out, or "
                "set zero_stage=3."
            )
        self.transformer_moe_cls_names = asked.value if asked is not None else None

    @property
    def accumulation_steps(self) -> int | None:
        """Micro batches an optimizer step, where the configuration says so; None where the Accelerator decides."""
        config = self._filling.reopened(self.deepspeed_config)
        train, micro, steps = (config.get(key) for key in validation.COUNTS)
        if steps is None and isinstance(train, int) and isinstance(micro, int) and PartialState._shared_state:
            # As DeepSpeed reads a configuration that leaves it out.
            return max(train // (micro * PartialState().num_processes), 1)
        return steps if isinstance(steps, int) else None

    @property
    def precision(self) -> str | None:
        """What the configuration enables, "fp16" or "bf16"; None where it leaves that open or turns both off."""
        return ds_config.enabled(self._precision_filling.reopened(self.deepspeed_config))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Enter the Accelerator's precision where the configuration leaves it open.

        Raises:
            ConfigurationError: the configuration enables another one.
        """
        asked = self._precision_filling.reopened(self.deepspeed_config)
        settled = copied(asked)
        ds_config.settle(settled, mixed_precision, self._name)
        self._precision_filling.show(self.deepspeed_config, asked, settled)

    def resolve(self, facts: PreparedFacts) -> dict[str, Any]:
        """The configuration of an engine, without "auto".

        Args:
            facts: what is prepared, and where.

        Returns:
            A new dictionary for ``deepspeed.initialize``, whose ``train_batch_size`` is micro batch x accumulation
            steps x processes.

        Raises:
            ConfigurationError: a value cannot be found, or contradicts another; the message names both.
        """
        config = self._filling.reopened(self.deepspeed_config)
        validation.check_sections(config, self._name)
        asked = copied(config)
        ds_config.settle(config, facts.mixed_precision, self._name)
        if facts.known_micro_batch_size is None:
            facts = replace(facts, known_micro_batch_size=micro_batch_of_others(self))
        auto_values.complete(config, facts, self._name, self.is_train_batch_min)
        validation.check(config, self._name)
        validation.check_complete(config, self._name, facts.world_size)
        self._filling.show(self.deepspeed_config, asked, config)
        self._read_back()
        return config

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether the value of a dotted key is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key in ``deepspeed_config``."""
        return get(self.deepspeed_config, ds_key_long, default)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace one "auto" by the value of the same dotted name in ``kwargs``, or compare.

        Args:
            ds_key_long: the dotted key.
            mismatches: gets a line where the two differ.
            must_match: compare where the value is not "auto".
            **kwargs: values by dotted key.

        Raises:
            ConfigurationError: the value is "auto", and ``kwargs`` has none.
        """
        ds_config.fill_match(
            self.deepspeed_config, ds_key_long, [] if mismatches is None else mismatches, must_match, kwargs
        )

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace every "auto" by the value of the same dotted name in ``kwargs``, and compare the rest.

        Args:
            prefix: what the keys of ``config`` begin with.
            mismatches: gets a line for each difference; left out, differences are an error.
            config: a section; left out, the whole configuration.
            must_match: compare values that are not "auto".
            **kwargs: values by dotted key.

        Raises:
            ConfigurationError: an "auto" without a value, or a difference.
        """
        lines: list[str] = [] if mismatches is None else mismatches
        ds_config.process(
            self.deepspeed_config,
            prefix,
            self.deepspeed_config if config is None else config,
            lines,
            must_match,
            kwargs,
        )
        if mismatches is None and lines:
            raise ConfigurationError(
                "the DeepSpeed configuration and the script differ:\n"
                + "\n".join(lines)
                + '\nCorrect one of them, or write "auto" there.'
            )

    @property
    def selected(self) -> bool:
        """Whether this is the plugin that the next model is prepared with."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise ConfigurationError(
            f"selected={value!r} cannot be set. Call accelerator.state.select_deepspeed_plugin(name)."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Called by ``accelerator.state.select_deepspeed_plugin(name)``.

        Raises:
            ConfigurationError: called by somebody else, so that two plugins could be selected.
        """
        if not _from_accelerator_state:
            raise ConfigurationError(
                "a plugin is selected by its name: call accelerator.state.select_deepspeed_plugin(name)."
            )
        self._selected = True
        self.set_deepspeed_weakref()
        while self._notes:
            logger.log(*self._notes.pop(0))

    def _unselect(self) -> None:
        self._selected = False
        self.release()

    def release(self) -> None:
        """Have Transformers create models as usual again: training is over."""
        if self.dschf is not None:
            self.dschf = None
            runtime.withdraw()

    def is_zero3_init_enabled(self) -> bool:
        """Whether Transformers creates models sharded while this plugin is selected."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """In the block, have Transformers create models sharded (``enable``) or whole."""
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Tell Transformers whether models are created sharded; what it is told is in force as long as this plugin
        lives.
        """
        if self.zero3_init_flag and self.zero_stage == 3:
            self.dschf = runtime.announce(self.deepspeed_config)
        else:
            self.dschf = None
            runtime.withdraw()

    @property
    def config(self) -> dict[str, Any]:
        """A copy without "auto", for ``deepspeed.zero.Init(config_dict_or_path=...)``, which creates any model sharded."""
        return runtime.usable(self.deepspeed_config)

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Have stage 3 fetch each mixture-of-experts layer as a whole: which experts a rank runs depends on its data.

        Raises:
            ConfigurationError: the model has no module of a class in ``transformer_moe_cls_names``.
            MissingDependencyError: DeepSpeed is not installed.
        """
        if self.zero_stage == 3 and self.transformer_moe_cls_names:
            from . import runtime

            runtime.mark(model, self.transformer_moe_cls_names)


def _holder(config: dict[str, Any]) -> HfDeepSpeedConfig:
    """The configuration as an object that shares its dictionary."""
    holder = HfDeepSpeedConfig.__new__(HfDeepSpeedConfig)
    holder.config = config
    holder.set_stage_and_offload()
    return holder
