"""What ``accel checkpoint`` does."""
