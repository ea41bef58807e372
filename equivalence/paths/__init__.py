"""Optimized ways through an indexer layer, shipped as candidates and as originals."""
