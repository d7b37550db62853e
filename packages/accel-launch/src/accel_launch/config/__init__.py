"""Configuration files: reading, writing, updating, and keeping their comments."""
