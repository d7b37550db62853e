"""What the launchers of several machines know of each other. Torch-free."""
