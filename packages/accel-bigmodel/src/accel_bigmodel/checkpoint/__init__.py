"""Reading checkpoints: files, headers, and which tensor of a checkpoint belongs to which parameter."""
