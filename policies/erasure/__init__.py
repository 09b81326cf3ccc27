"""Which cold pages are kept by parity instead of more replicas: one algorithm a file."""
