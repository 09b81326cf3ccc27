"""`kvharbor policy` as a program: what it prints, and what it refuses before it asks anybody."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.operator import PoliciesInForce, PolicyRow
from tests.contract.cli_rig import ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FORCE = PoliciesInForce(
    (
        PolicyRow(
            "eviction", "ttl-lfu", {"ghost_factor": 4.0, "ttl_s": 600.0}, ("lru", "ttl-lfu"), True
        ),
        PolicyRow("placement", "most_free", {}, ("most_free",), False),
    )
)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a master that says the same to everything."""
    with ScriptedMaster(ListenerIdentity("c"), IN_FORCE) as running:
        yield running.address


@pytest.mark.parametrize(
    "words", [("show",), ("set", "eviction", "ttl-lfu", "ttl_s=600"), ("reset", "eviction")]
)
def test_the_policies_for_people_and_for_programs(master: str, words: tuple[str, ...]) -> None:
    done = kvharbor("policy", *words, "--master", master)
    assert done.returncode == 0, done.stderr
    _, _, *rows = filter(None, map(str.split, done.stdout.splitlines()))
    assert rows == [
        ["eviction", "ttl-lfu", "operator", "ghost_factor", "4", "lru"],
        ["ttl_s", "600"],
        ["placement", "most_free", "configuration", "-", "-", "-"],
    ]
    done = kvharbor("--json", "policy", *words, KVHARBOR_MASTER=master)
    eviction, _ = json.loads(done.stdout)["policies"]
    assert eviction["parameters"] == IN_FORCE.policies[0].parameters
    assert eviction["known"] == ["lru", "ttl-lfu"]


def test_a_parameter_without_a_value_is_named() -> None:
    text = refused(ExitCode.USAGE, "policy", "set", "eviction", "lrfu", "half_life_s")
    assert text == "parameter: got 'half_life_s', want name=value"
