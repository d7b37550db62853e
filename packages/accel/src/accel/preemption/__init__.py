"""Saving on a signal: the handler, the step at which all ranks stop, and the rollback of an evaluation."""
