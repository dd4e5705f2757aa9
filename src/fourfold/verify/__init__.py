"""A layout held against one device; a ledger of every sample."""
