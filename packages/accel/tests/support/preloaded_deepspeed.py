"""Imports DeepSpeed in the server that ranks are forked from, with what its engines import when they are built: torch's
compiler, for an optimizer that is never used, takes each rank two seconds.
"""

from __future__ import annotations

import os

if "DS_ACCELERATOR" not in os.environ:
    # DeepSpeed chooses the accelerator of the machine as it is imported; the ranks of tests compute on the CPU.
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        del os.environ["DS_ACCELERATOR"]
