"""Views of runs of the jsonl tracker: text, image and HTML page."""
