"""Collectives between the processes of a run; a null object for a single process."""
