"""Setting up an Accelerator: resolving its configuration, and preparing objects."""
