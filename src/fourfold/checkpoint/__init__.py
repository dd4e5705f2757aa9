"""Saving and resuming (not built yet)."""
