"""Checkpoints in object storage, by the URLs of fsspec. Torch-free."""
