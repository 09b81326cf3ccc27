"""Golden bytes of every message, record and id: here, and in processes with other hash seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages import CONVERSATIONS, REGISTRY, RETIRED_TAGS
from kvstore.wire.messages.base import Message, tag_of
from tests.unit import golden_vectors

EXAMPLES = golden_vectors.message_examples()
GOLDEN = golden_vectors.stored("messages.json")
HOW_TO_ADD = "a new message? run: python -m tests.unit.golden_vectors --add"


def test_every_message_has_golden_bytes_and_none_has_gone() -> None:
    assert sorted(GOLDEN) == sorted(EXAMPLES), HOW_TO_ADD


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_golden_bytes_of_message(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == GOLDEN.get(name), HOW_TO_ADD
    assert decode(bytes.fromhex(GOLDEN[name])) == EXAMPLES[name]


def test_golden_ids_keys_records_and_headers() -> None:
    assert golden_vectors.identity_vectors() == golden_vectors.stored("identity.json")


def test_other_processes_with_other_hash_seeds_give_the_same_bytes() -> None:
    want = {name: golden_vectors.stored(name) for name in golden_vectors.everything()}
    command = [sys.executable, "-m", "tests.unit.golden_vectors"]
    children = [
        subprocess.Popen(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE
        )
        for seed in ("0", "1", "4242")
    ]
    for child in children:
        printed, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert json.loads(printed) == want


def test_tags_are_small_unique_and_not_retired() -> None:
    kinds = [
        item
        for module in CONVERSATIONS
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Message) and item is not Message
    ]
    tags = [tag_of(kind) for kind in set(kinds)]
    assert len(tags) == len(set(tags)) == len(REGISTRY)
    assert all(0 < tag < 256 for tag in tags)
    assert not RETIRED_TAGS & set(tags)


def test_messages_say_what_they_are_for() -> None:
    assert [kind.__name__ for kind in REGISTRY.values() if not (kind.__doc__ or "").strip()] == []


def test_messages_are_frozen_values() -> None:
    for message in EXAMPLES.values():
        config = type(message).__struct_config__
        assert config.frozen, message
        assert config.array_like, message
        assert config.forbid_unknown_fields, message
