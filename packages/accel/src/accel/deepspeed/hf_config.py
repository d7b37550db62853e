"""A DeepSpeed configuration that is asked by dotted keys, under the name that other libraries know."""

from __future__ import annotations

from typing import Any

from accel_state.errors import ConfigurationError

from .nested import MISSING, get
from .sources import read


class HfDeepSpeedConfig:
    """A configuration, and what it says of stage and offload.

    Args:
        config_file_or_dict: the path of a JSON file, a dictionary (which is copied), or the JSON in base64.

    Attributes:
        config: the dictionary.

    Raises:
        ConfigurationError: it is none of these, or cannot be read.
    """

    config: dict[str, Any]

    def __init__(self, config_file_or_dict: Any) -> None:
        config, _ = read(config_file_or_dict, None)
        if config is None:
            raise ConfigurationError("HfDeepSpeedConfig(None) is no configuration. Pass the path of a JSON file or a dictionary.")
        self.config = config
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read stage and offload again, after ``config`` was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param"))
        self._offload = any(device in ("cpu", "nvme") for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that a dotted key is in, None where there is none, and the last part of the key."""
        section, _, key = ds_key_long.rpartition(".")
        node = get(self.config, section) if section else self.config
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key; ``default`` where there is none."""
        return get(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with everything under it.

        Raises:
            ConfigurationError: there is none, and ``must_exist``.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ConfigurationError(f"the DeepSpeed configuration has no {ds_key_long}. Its keys: {', '.join(self.config)}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is there, with a value that counts as true."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is there, with a value that counts as false."""
        value = self.get_value(ds_key_long, MISSING)
        return value is not MISSING and value is not None and not value

    def is_zero2(self) -> bool:
        """Whether ZeRO stage 2 is set."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether ZeRO stage 3 is set."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded to CPU memory or a drive."""
        return self._offload
