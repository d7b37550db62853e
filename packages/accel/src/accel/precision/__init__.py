"""In which precision a model computes: one file a precision."""
