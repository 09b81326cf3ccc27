"""One owner per third-party package, and proof that a stranger is caught."""

from __future__ import annotations

import pytest

from tests.tidy import owners
from tests.tidy.bans import matches
from tests.tidy.sources import PACKAGES, Source, sources

OFFENDERS = [
    ("kvstore/client/store.py", "import torch"),
    ("kvstore/client/store.py", "def late() -> None:\n    from torch import nn"),
    ("master/state.py", "import aiohttp.web"),
    ("kvstore/transfer/tcp.py", "from mooncake.engine import TransferEngine"),
    ("kvstore/rpc/server.py", "import msgspec\nx = msgspec.msgpack.Encoder()"),
    ("kvstore/rpc/server.py", "from msgspec import msgpack"),
    ("master/persistence.py", "import sqlite3"),
]

ALLOWED = [
    ("kvstore/client/tensors.py", "import torch"),
    ("kvstore/admin_http.py", "from aiohttp import web"),
    ("kvstore/transfer/mooncake.py", "from mooncake.engine import TransferEngine"),
    ("kvstore/wire/encoding.py", "from msgspec import msgpack"),
    ("master/directory.py", "import msgspec\nclass Run(msgspec.Struct): ..."),
    ("master/state.py", "from torchlike import x"),
]


OWNED = (*PACKAGES, "benchmarks")


def test_every_third_party_package_stays_with_its_owner() -> None:
    found = [line for source in sources(OWNED) for line in owners.strangers(source)]
    assert not found, "\n".join(found)


def test_every_owner_exists() -> None:
    paths = [source.path for source in sources(OWNED)]
    patterns = {pattern for each in owners.OWNERS.values() for pattern in each}
    assert not [each for each in patterns if not any(matches(path, (each,)) for path in paths)]


@pytest.mark.parametrize(("path", "text"), OFFENDERS)
def test_a_stranger_is_found(path: str, text: str) -> None:
    assert list(owners.strangers(Source(path, text)))


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_an_owner_is_left_alone(path: str, text: str) -> None:
    assert not list(owners.strangers(Source(path, text)))
