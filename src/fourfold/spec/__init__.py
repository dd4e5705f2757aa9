"""The request: model, data, batch, optimizer, precision, layout, checkpoint, run, hardware; rank arithmetic."""
