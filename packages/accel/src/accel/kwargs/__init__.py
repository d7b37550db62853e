"""Settings handed to the Accelerator in `kwargs_handlers`: one file a handler."""
