"""Composed pages of ranks: what each must hold, which are wrong, and what they are instead."""
