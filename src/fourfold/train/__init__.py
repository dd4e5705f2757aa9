"""The loop on one screen, the step, optimizer, precision, census, metrics."""
