"""Several kinds of parallelism on one mesh of processes."""
