"""Ways to start processes, one file each."""
