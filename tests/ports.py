"""Ports for processes that have to be told one before they start. Not a test."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
