"""Runs of the JSON-lines tracker, for people: in the terminal, as an image, as a page."""
