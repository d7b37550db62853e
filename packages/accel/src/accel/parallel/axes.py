"""The axes of a mesh of processes, and which of them data, gradients and parameters are distributed over."""

from __future__ import annotations

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes, outermost first: ranks that differ along the last axis only are consecutive.

Axes that communicate most are innermost, where ranks share a node: tensor parallelism all-reduces in every layer, a
pipeline sends activations once for each stage.
"""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks that differ along these get different samples."""

AVERAGING_AXES = ("dp_replicate", "dp_shard", "cp", "sp")
"""Ranks that differ along these have different tokens, over which gradients are averaged."""

SHARDING_AXES = ("dp_shard", "cp", "sp")
"""Ranks that parameters may be sharded over."""

EXPERT_AXES = ("dp_shard", "cp", "tp")
"""Ranks that experts may be distributed over: ep_size divides the product of these sizes."""
