from .arithmetic import ShardPlan as ShardPlan
from .batch_shard import BatchSamplerShard as BatchSamplerShard
from .samplers import SeedableRandomSampler as SeedableRandomSampler
from .samplers import SkipBatchSampler as SkipBatchSampler
from .samplers import get_sampler as get_sampler
