"""Ranks that read each other's pages: the ways engines compose them, and what carries the bytes."""
