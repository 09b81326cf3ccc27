"""Which pages are worth a write to a tier: one algorithm a file."""
