"""Weights that lie in a folder, under the module path that other libraries know."""

from accel_bigmodel import OffloadedWeightsLoader as OffloadedWeightsLoader
from accel_bigmodel import PrefixedDataset as PrefixedDataset
from accel_bigmodel import extract_submodules_state_dict as extract_submodules_state_dict
from accel_bigmodel import load_offloaded_weight as load_offloaded_weight
from accel_bigmodel import offload_state_dict as offload_state_dict
from accel_bigmodel import offload_weight as offload_weight
from accel_bigmodel import save_offload_index as save_offload_index
