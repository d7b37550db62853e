"""``accel test``: a short real run on this machine's processes, compared with plain PyTorch."""
