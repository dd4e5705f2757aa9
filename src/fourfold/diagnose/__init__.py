"""Reads a Run and says what it shows."""
