"""Measurements: one file a question, each runnable; the files without a `main` help them."""
