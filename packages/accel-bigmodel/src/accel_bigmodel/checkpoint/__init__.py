"""Reading checkpoints: locating files, mapping tensors, and matching them with a model's parameters."""
