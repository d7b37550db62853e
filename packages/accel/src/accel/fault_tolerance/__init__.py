"""Training on replicas that may be killed at any moment."""
