"""How a model is wrapped, synchronised, clipped and unwrapped: one file a strategy."""
