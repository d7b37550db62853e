"""Functions of the reference that work on an Accelerator."""
