"""The state of an Accelerator: what it consists of, saving it and loading it."""
