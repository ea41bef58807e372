"""Hypothesis is derandomized, has no deadline and keeps no database; torch has one thread.

The tensors of tests are tiny: threads that wait for each other take most of the time.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest_plugins = ["pytester"]

settings.register_profile("equivalence", derandomize=True, deadline=None, database=None)
settings.load_profile("equivalence")
