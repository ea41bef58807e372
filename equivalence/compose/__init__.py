"""Pages composed by context-parallel ranks: steps to compose, ways run over them, and judges."""
