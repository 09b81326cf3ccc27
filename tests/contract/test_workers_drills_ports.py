"""Ports that are given out before a program listens: nobody else gets them meanwhile."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from workers.drills.ports import FIRST, LOOPBACK, Claims, free_port

RANGE = range(FIRST, FIRST + 1_000)


def test_none_is_one_that_the_kernel_gives_to_others() -> None:
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == len(given)
    assert all(FIRST <= port < first_of_kernel for port in given)
    for port in given:
        socket.create_server((LOOPBACK, port)).close()


def test_one_that_is_listened_at_is_passed_over() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        taken = listener.getsockname()[1]
        with closing(Claims([taken, *RANGE])) as claims:
            assert claims.free_port() in RANGE
        with closing(Claims([taken])) as claims, pytest.raises(OSError, match="no port is left"):
            claims.free_port()


def test_one_that_somebody_else_was_given_is_passed_over_until_he_ends() -> None:
    with closing(Claims(RANGE)) as mine:
        port = mine.free_port()
        with closing(Claims([port])) as other, pytest.raises(OSError, match="no port is left"):
            other.free_port()
    with closing(Claims([port])) as later:
        assert later.free_port() == port
