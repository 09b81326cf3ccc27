"""Who leaves a segment under pressure: one algorithm a file."""
