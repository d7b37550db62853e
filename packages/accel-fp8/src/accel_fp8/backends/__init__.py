"""What computes in 8 bits: one file a back end, named as it is registered."""
