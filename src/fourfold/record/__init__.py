"""The run directory: events, metrics, findings, failure bundles, manifest; one writer, one reader."""
