"""Seeded cases of one family a module; `generate` is their door."""
