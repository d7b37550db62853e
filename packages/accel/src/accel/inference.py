"""Pipelined inference, under the module path that other libraries know."""

from accel_bigmodel.inference import build_pipeline as build_pipeline
from accel_bigmodel.inference import find_pippy_batch_size as find_pippy_batch_size
from accel_bigmodel.inference import generate_device_map as generate_device_map
from accel_bigmodel.inference import pippy_forward as pippy_forward
from accel_bigmodel.inference import prepare_pippy as prepare_pippy
from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from accel_state.device_checks import is_pippy_available as is_pippy_available
from accel_state.humanize import convert_bytes as convert_bytes
from accel_state.operations import copy_tensor_to_devices as copy_tensor_to_devices
from accel_state.operations import ignorant_find_batch_size as ignorant_find_batch_size
from accel_state.operations import pad_input_tensors as pad_input_tensors
