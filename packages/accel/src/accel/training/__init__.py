"""What happens inside the training loop: gradient accumulation, metrics, uneven inputs, trackers."""
