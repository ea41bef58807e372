"""Adapters that call the kernels of engines; each is found when it is called."""
