"""Sharded models: settings, which modules become units, and what optimizers and gradients need. The strategies build on
it.
"""
