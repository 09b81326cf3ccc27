"""Real processes on loopback, killed and stopped on purpose."""
