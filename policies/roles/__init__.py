"""Which inference workers change their role: one algorithm a file."""
