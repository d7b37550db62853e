"""The trackers: one file each."""
