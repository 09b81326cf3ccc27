"""The packet filter by which the network between two hosts loses packets."""

from __future__ import annotations

import os
import shutil

import pytest

from kvstore.errors import AccessDenied, ConfigError
from workers.drills.network import DRAWS, far, loss_program, near, require_network

LOAD_RANDOM, MODULO, JUMP_AT_LEAST, RETURN = 0x20, 0x94, 0x35, 0x06
PASS, DROP = 0xFFFFFFFF, 2


def run(program: str, drawn: int) -> int:
    """What a kernel does with such a program and that random number."""
    count, *lines = program.split(",")
    assert int(count) == len(lines)
    value, at = 0, 0
    while True:
        code, jump, other, number = (int(each) for each in lines[at].split())
        at += 1
        if code == LOAD_RANDOM:
            value = drawn
        elif code == MODULO:
            value %= number
        elif code == JUMP_AT_LEAST:
            at += jump if value >= number else other
        else:
            assert code == RETURN
            return number


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 1.0])
def test_it_drops_one_packet_in_so_many(fraction: float) -> None:
    said = [run(loss_program(fraction), drawn) for drawn in range(DRAWS)]
    assert said.count(DROP) == DRAWS * fraction
    assert set(said) <= {PASS, DROP}


def test_each_host_has_an_address_on_each_link() -> None:
    assert len({where(rail) for where in (near, far) for rail in (1, 2)}) == 4


def test_who_cannot_have_a_network_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(AccessDenied, match="root"):
        require_network()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(ConfigError, match="not found on PATH: tc "):
        require_network()
