"""What ``accel track`` does."""
