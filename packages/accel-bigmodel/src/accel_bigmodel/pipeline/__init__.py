"""Pipelined inference: the model's own forward runs on every rank, and each rank computes its share of the module
calls.
"""
