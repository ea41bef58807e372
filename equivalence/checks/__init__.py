"""Checks: each decides the rows of one output and explains the ones that fail."""
