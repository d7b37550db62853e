"""Sharded loaders, under the module path that other libraries know."""

# finetrainers and others import torch's classes from here, since the reference's module uses them.
from torch.utils.data import BatchSampler as BatchSampler
from torch.utils.data import DataLoader as DataLoader
from torch.utils.data import IterableDataset as IterableDataset
from torch.utils.data import RandomSampler as RandomSampler

from accel_data import BatchSamplerShard as BatchSamplerShard
from accel_data import DataLoaderAdapter as DataLoaderAdapter
from accel_data import DataLoaderDispatcher as DataLoaderDispatcher
from accel_data import DataLoaderShard as DataLoaderShard
from accel_data import DataLoaderStateMixin as DataLoaderStateMixin
from accel_data import IterableDatasetShard as IterableDatasetShard
from accel_data import SeedableRandomSampler as SeedableRandomSampler
from accel_data import SkipBatchSampler as SkipBatchSampler
from accel_data import SkipDataLoader as SkipDataLoader
from accel_data import get_sampler as get_sampler
from accel_data import prepare_data_loader as prepare_data_loader
from accel_data import skip_first_batches as skip_first_batches
from accel_state import AcceleratorState as AcceleratorState
from accel_state import DistributedType as DistributedType
from accel_state import GradientState as GradientState
from accel_state import PartialState as PartialState
from accel_state import RNGType as RNGType
from accel_state.imports import compare_versions as compare_versions
from accel_state.imports import is_torch_version as is_torch_version
from accel_state.imports import is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available
from accel_state.logging import get_logger as get_logger
from accel_state.operations import broadcast as broadcast
from accel_state.operations import broadcast_object_list as broadcast_object_list
from accel_state.operations import concatenate as concatenate
from accel_state.operations import find_batch_size as find_batch_size
from accel_state.operations import get_data_structure as get_data_structure
from accel_state.operations import initialize_tensors as initialize_tensors
from accel_state.operations import send_to_device as send_to_device
from accel_state.operations import slice_tensors as slice_tensors
from accel_state.random import synchronize_rng_states as synchronize_rng_states
