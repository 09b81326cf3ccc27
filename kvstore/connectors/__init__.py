"""Doors for inference engines: each module imports its engine, and nothing else imports them."""
