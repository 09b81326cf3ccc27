"""The whole control plane in one thread, under virtual time, from a seed."""
