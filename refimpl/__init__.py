"""Pure-torch references of sparse-attention indexers: functions that read like the formula."""
