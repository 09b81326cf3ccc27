"""What an operator does to a running pool by the command line, against what its engines see."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import Attention, CacheGroup, Content, Hints, KVStore, Layout, OutOfSpace
from kvstore.exit_codes import ExitCode
from kvstore.ids import short
from tests.cluster.up import kvharbor

if TYPE_CHECKING:
    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GROUP = CacheGroup(Attention.FULL, 1, 1, 8, 8)
CONTENT = Content("default", "operator", "r", "", "float16", (GROUP,), "rope")
LAYOUT = Layout(page_tokens=128)
PAGE = 4096


def told(pool: Up, *words: str) -> dict[str, Any]:
    """What a command says to programs."""
    done = kvharbor("--json", *words, f"--master={pool.master}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_policies_are_shown_changed_and_reset(shared_pool: Up) -> None:
    before = told(shared_pool, "policy", "show")
    kinds = [row["kind"] for row in before["policies"]]
    assert kinds == [
        "eviction", "admission", "placement", "replication", "erasure",
        "prefill_routing", "decode_routing", "colocation", "roles",
    ]  # fmt: skip
    changed = told(shared_pool, "policy", "set", "eviction", "ttl-lfu", "ttl_s=60")
    eviction = changed["policies"][0]
    assert (eviction["name"], eviction["parameters"]["ttl_s"]) == ("ttl-lfu", 60.0)
    assert eviction["is_set"]
    assert told(shared_pool, "policy", "show") == changed
    done = kvharbor("policy", "set", "eviction", "random", f"--master={shared_pool.master}")
    assert done.returncode == ExitCode.USAGE
    assert "eviction: got 'random', want one of lrfu, lru" in done.stderr
    assert told(shared_pool, "policy", "reset", "eviction") == before


def test_pins_are_shared_by_engines_and_operators(shared_pool: Up) -> None:
    with KVStore.connect(shared_pool.master) as store:
        pages = store.open(CONTENT, LAYOUT, ttl_s=600.0)
        chain = pages.chain(range(128 * 4))
        source = store.buffer(4 * PAGE)
        store.put(pages, chain, source, range(0, 4 * PAGE, PAGE), hints=Hints(turn=1))
        assert store.pin(pages, chain, owner="engine", ttl_s=60.0) == [True] * 4
        namespace, keys = pages.namespace.id.hex(), [key.hex() for key in chain]
        words = ("pin", namespace, *keys, "--owner=me", "--ttl-s=inf", "--hard")
        assert told(shared_pool, *words) == {"pinned": 4}
        rows = told(shared_pool, "pins")["pins"]
        assert [(row["owner"], row["hard"], row["pages"]) for row in rows] == [
            ("engine", False, 4),
            ("me", True, 4),
        ]
        assert rows[1]["namespace"] == namespace
        assert [row.owner for row in store.pins()] == ["engine", "me"]
        shown = kvharbor("pins", f"--master={shared_pool.master}").stdout
        assert "for ever" in shown
        assert short(pages.namespace.id) in shown
        assert told(shared_pool, "unpin", namespace, keys[0], "--owner=me") == {"unpinned": 1}
        assert told(shared_pool, "unpin", namespace, "--owner=me") == {"unpinned": 3}
        assert store.remove(pages, chain) == [True] * 4
        assert store.pins() == ()


def test_a_quota_is_an_error_that_says_so(own_pool: Up) -> None:
    with KVStore.connect(own_pool.master) as store:
        pages = store.open(CONTENT, LAYOUT)
        count = 16 * 256 + 1  # a page more than a quarter of 64 MiB
        chain = pages.chain(range(128 * count))
        source = store.buffer(count * PAGE)
        store.put(pages, chain, source, range(0, count * PAGE, PAGE))
        with pytest.raises(OutOfSpace, match="pin_quota: tenant default has pinned"):
            store.pin(pages, chain, owner="engine", ttl_s=60.0, hard=True)
        assert store.unpin(pages, owner="engine") == 16 * 256, "the batch before stays"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("pin", "abc", "--owner=o", "--ttl-s=1"), "key: got '', want at least one"),
        (("pin", "abc", "00" * 32, "--owner=o", "--ttl-s=1"), "namespace: got 'abc', want 64 hex"),
        (("unpin", "00" * 32, "xyz", "--owner=o"), "key: got 'xyz', want 64 hex digits"),
    ],
)
def test_what_is_never_right_is_named_before_anybody_is_asked(
    words: tuple[str, ...], text: str
) -> None:
    done = kvharbor(*words)
    assert done.returncode == ExitCode.USAGE
    assert text in done.stderr
