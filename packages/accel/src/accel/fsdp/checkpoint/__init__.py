"""Sharded state dicts: in memory and as files of torch.distributed.checkpoint."""
