"""``accel doctor``: checks of this machine, and of the machines of a cluster together."""
