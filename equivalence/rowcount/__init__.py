"""Row-count invariance: ways to make one call, played, compared, and shrunk."""
