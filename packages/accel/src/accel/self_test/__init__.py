"""``accel test``: a short training run on the configured processes, compared with plain PyTorch."""
