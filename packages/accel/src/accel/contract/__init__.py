"""The contract between a training loop and what trains in it: strategy, optimizer and scheduler."""
