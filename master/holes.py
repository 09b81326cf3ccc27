"""Making nodes for pages that come into the tree, with what the eviction policy knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES
from master.run import Run
from policies.hints import NO_HINTS

if TYPE_CHECKING:
    from master.core import Core
    from master.directory import Stretch, Tree


def make_holes(
    core: Core, tree: Tree, parent: bytes, keys: bytes, found: list[Stretch], ttl_s: float
) -> None:
    """Make holes of those pages of a chain below `parent` that are not in the tree.

    `found` are those that are: the stretches of `keys`, or of a chain that begins with them.
    """
    at, end = 0, len(keys)
    for stretch in found:
        start = min(stretch.first * KEY_BYTES, end)
        _make(core, tree, keys[at - KEY_BYTES : at] if at else parent, keys[at:start], ttl_s)
        at = min(start + stretch.count * KEY_BYTES, end)
    _make(core, tree, keys[at - KEY_BYTES : at] if at else parent, keys[at:], ttl_s)


def _make(core: Core, tree: Tree, parent: bytes, keys: bytes, ttl_s: float) -> None:
    """As many runs as the policy tells pages apart."""
    while keys:
        pattern = Run(tree.namespace, parent, b"", ttl_s, core.now, core.now + ttl_s)
        stop = core.eviction.entered(pattern, keys, core.now, NO_HINTS) * KEY_BYTES
        tree.add(pattern, keys[:stop])
        parent, keys = keys[stop - KEY_BYTES : stop], keys[stop:]
