"""How models are wrapped, synchronised, clipped and saved: one file per strategy."""
