"""Settings passed to the Accelerator as ``kwargs_handlers``."""
