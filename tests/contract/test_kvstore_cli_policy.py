"""`kvharbor policy` as a program: what it prints, and what it refuses before it asks anybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.operator import PolicyInForce
from tests.contract.test_kvstore_cli_status import ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FORCE = PolicyInForce("ttl-lfu", {"ghost_factor": 4.0, "ttl_s": 600.0}, ("lru", "ttl-lfu"))


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a master that says the same to everything."""
    with ScriptedMaster(ListenerIdentity("c"), IN_FORCE) as running:
        yield running.address


@pytest.mark.parametrize("words", [("show",), ("set", "ttl-lfu", "ttl_s=600")])
def test_the_policy_for_people_and_for_programs(master: str, words: tuple[str, ...]) -> None:
    done = kvharbor("policy", *words, "--master", master)
    assert done.returncode == 0, done.stderr
    assert "eviction ttl-lfu (there are also lru)" in done.stdout
    assert "ttl_s" in done.stdout
    assert "600" in done.stdout
    done = kvharbor("--json", "policy", *words, KVHARBOR_MASTER=master)
    assert json.loads(done.stdout)["parameters"] == IN_FORCE.parameters


def test_a_parameter_without_a_value_is_named() -> None:
    text = refused(ExitCode.USAGE, "policy", "set", "lrfu", "half_life_s")
    assert text == "parameter: got 'half_life_s', want name=value"
