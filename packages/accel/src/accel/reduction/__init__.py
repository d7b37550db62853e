"""Gradient reduction in an order that does not depend on the number of processes."""
