"""A candidate beside an original: its turns, layer-forwards, counts and evidence."""
