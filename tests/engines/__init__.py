"""Tests with real inference engines on a CPU; run in .venv-engines by `make test-engines`."""
