"""FP8 back ends, one module each, named as registered."""
