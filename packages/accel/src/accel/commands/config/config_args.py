"""Configuration files as objects, under the module path that other libraries know."""

from __future__ import annotations

from accel_launch.config.update import LoadedConfig as BaseConfig
from accel_launch.config.update import load_config_from_file as load_config_from_file
from accel_state.options import default_folder, default_path, find_default

ClusterConfig = BaseConfig
SageMakerConfig = BaseConfig
cache_dir: str = str(default_folder())
default_yaml_config_file: str = str(default_path())
default_config_file: str = str(find_default() or default_path())
default_json_config_file: str = str(default_path().with_suffix(".json"))
