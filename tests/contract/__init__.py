"""One suite per port, run against the real adapter and its fake."""
