"""What is predicted before anything is started: sizes, bytes and counts of a run."""
