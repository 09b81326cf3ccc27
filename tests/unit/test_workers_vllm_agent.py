"""What an agent makes of its server's description."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.block_hashes import SHA256_CBOR, VLLM_SEED, Hashing
from kvstore.connectors.engine_namespace import EngineFields, as_text, namespaces
from kvstore.connectors.vllm.fields import hash_seed
from kvstore.errors import BadValue
from tests.unit.scheduler_rig import FIELDS, FULL, SLIDING
from workers.vllm_agent import pages_of


def described(**changes: object) -> EngineFields:
    return msgspec.structs.replace(FIELDS, **changes)


def test_the_fleet_s_pages_are_those_of_the_first_group_that_keeps_prefixes() -> None:
    fields = described(groups=(SLIDING, FULL))
    pages = pages_of(as_text(fields))
    assert pages.namespaces == namespaces(fields)
    assert (pages.namespace, pages.number) == (namespaces(fields)[1], 1)
    assert pages.handed_over(3).tokens == 3 * FIELDS.block_tokens
    assert len(pages.handed_over(3).namespaces) == 2


def test_hashes_begin_with_the_engine_s_seed() -> None:
    seeds = [hash_seed(SHA256_CBOR, environment) for environment in ({}, {"PYTHONHASHSEED": "5"})]
    found = [pages_of(as_text(described(hash_seed=seed))) for seed in seeds]
    assert [each.hashing for each in found] == [
        Hashing(SHA256_CBOR, VLLM_SEED),
        Hashing(SHA256_CBOR, "5"),
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"hash_algorithm": "sha256"}, "hash_algorithm"), ({"groups": (SLIDING,)}, "groups")],
)
def test_what_no_gateway_can_name_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadValue, match=f"^{field}"):
        pages_of(as_text(described(**changes)))
