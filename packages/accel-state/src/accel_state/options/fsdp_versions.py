"""What becomes of a setting of FSDP 1 in FSDP 2, for the launcher, the plugin and the converter of configuration files.

Settings have the names of the fields of FsdpOptions.
"""

from __future__ import annotations

from collections.abc import Mapping

RESHARD_OF_STRATEGY: Mapping[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
"""The ``reshard_after_forward`` of each sharding strategy that shards."""

_HYBRID = (
    "replicates a model over a device mesh: --parallelism_config_dp_replicate_size and "
    "--parallelism_config_dp_shard_size, or ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
)

WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = {
    "backward_prefetch": ("BACKWARD_POST", "always all-gathers the next parameters before it reduces gradients"),
    "forward_prefetch": (True, "prefetches implicitly; model.set_modules_to_forward_prefetch requests more"),
    "use_orig_params": (False, "always keeps the original parameters"),
    "limit_all_gathers": (False, "always limits them"),
}
"""The value that has no effect, and what version 2 does instead, as the end of "version 2 ..."."""

UNSUPPORTED: Mapping[tuple[str, object], str] = {
    ("sharding_strategy", "NO_SHARD"): (
        "shards every model; without FSDP (--use_fsdp, fsdp_plugin) every process holds a full copy"
    ),
    ("sharding_strategy", "HYBRID_SHARD"): _HYBRID,
    ("sharding_strategy", "HYBRID_SHARD_ZERO2"): _HYBRID,
    ("state_dict_type", "LOCAL_STATE_DICT"): (
        "writes SHARDED_STATE_DICT, which loads on any number of processes, or FULL_STATE_DICT"
    ),
}
"""What version 2 does or offers instead of a value that it refuses, in the same form."""
