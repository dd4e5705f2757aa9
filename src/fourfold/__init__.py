"""Train a model on many devices, and prove the run right."""

__version__ = "0.1.0"
