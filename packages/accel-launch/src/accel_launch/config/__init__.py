"""Configuration files: reading, writing, updating and converting."""
