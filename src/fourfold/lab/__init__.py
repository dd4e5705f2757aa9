"""The experiments, the demonstration, the report."""
