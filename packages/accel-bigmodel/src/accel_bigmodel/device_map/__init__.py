"""Device maps: which module goes to which device."""
