"""Sharded states, in the format of ``torch.distributed.checkpoint``."""
