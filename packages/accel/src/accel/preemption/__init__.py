"""Saving on a signal: the handler, the step on which all ranks stop, and the end of an evaluation loop."""
