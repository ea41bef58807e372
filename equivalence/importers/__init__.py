"""Importers: recordings of other tools become cases."""
