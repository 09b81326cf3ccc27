"""Where new replicas go: one algorithm a file."""
