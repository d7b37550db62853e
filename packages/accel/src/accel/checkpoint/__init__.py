"""Saving and loading the whole state of a run: contents, atomic directories, manifests and digests."""
