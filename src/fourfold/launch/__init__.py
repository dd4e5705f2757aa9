"""Ranks: our own elastic agent, warm pools, signals and exit codes, who failed first."""
