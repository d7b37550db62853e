"""Precisions in which models compute."""
