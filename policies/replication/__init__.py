"""How many replicas pages have because many read them: one algorithm a file."""
