"""Saving, loading, choosing, pruning: plain files, every byte hashed, nothing unpickled."""
