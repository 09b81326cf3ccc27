"""Making nodes for pages that come into the tree, with what the eviction policy knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES, ROOT_PARENT
from master.packed import split_keys
from master.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.hints import Hints
    from master.core import Core
    from master.directory import Stretch, Tree
    from master.pool_time import Life


def make_holes(
    core: Core,
    tree: Tree,
    parent: bytes,
    keys: bytes,
    found: list[Stretch],
    life: Life,
    hints: Hints,
) -> None:
    """Make holes of those pages of a chain below `parent` that are not in the tree.

    `found` are those that are: the stretches of `keys`, or of a chain that begins with them.
    """
    at, end = 0, len(keys)
    for stretch in found:
        start = min(stretch.first * KEY_BYTES, end)
        above = keys[at - KEY_BYTES : at] if at else parent
        _make(core, tree, above, keys[at:start], life, hints)
        at = min(start + stretch.count * KEY_BYTES, end)
    above = keys[at - KEY_BYTES : at] if at else parent
    _make(core, tree, above, keys[at:], life, hints)


def make_objects(
    core: Core, tree: Tree, planned: Iterable[bytes], life: Life, hints: Hints
) -> None:
    """Make holes of those of these named objects that are not in the tree: a run each."""
    for key in dict.fromkeys(key for keys in planned for key in split_keys(keys)):
        if tree.get(key) is None:
            _make(core, tree, ROOT_PARENT, key, life, hints)


def _make(core: Core, tree: Tree, parent: bytes, keys: bytes, life: Life, hints: Hints) -> None:
    """As many runs as the policy tells pages apart."""
    while keys:
        pattern = Run(tree.namespace, parent, b"", life.ttl_s, life.created_s, life.expires_s)
        stop = core.eviction.entered(pattern, keys, core.now, hints) * KEY_BYTES
        tree.add(pattern, keys[:stop])
        parent, keys = keys[stop - KEY_BYTES : stop], keys[stop:]
