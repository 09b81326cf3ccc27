"""What the eviction policy is told of a chain: the caller's hints, and the pool's own if wanted.

With `hints = "learned"` a lookup that names its chain from the first page on teaches the
predictor; what the caller leaves open is filled in from there, also for puts.

What is told lives in the numbers that the policy keeps with each run, and nowhere else: it is
bounded by the pool, and a new master begins without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.hints import NO_HINTS
from kvstore.ids import ROOT_PARENT

if TYPE_CHECKING:
    from kvstore.hints import Hints
    from kvstore.wire.messages.puts import BeginPut, PutChain
    from kvstore.wire.messages.reads import MatchPrefix
    from master.core import Core
    from master.directory import Stretch, Tree


def given(hints: Hints | None) -> Hints:
    """What the caller says; BadValue names the field that is never right."""
    if hints is None:
        return NO_HINTS
    hints.check()
    return hints


def of_match(core: Core, message: MatchPrefix, found: list[Stretch]) -> Hints:
    """Hints for the pages of this chain, of which `found` are there."""
    hints, predictor = given(message.hints), core.predictor
    if predictor is None or hints.session_closed:
        return hints
    if found and (found[0].page or found[0].run.parent != ROOT_PARENT):
        return predictor.recalled(hints, message.keys)  # the rest of a chain that was asked before
    return predictor.completed(hints, message.keys, core.now)


def of_put(core: Core, message: BeginPut, chain: PutChain) -> Hints:
    """Hints for the pages of this chain of a put."""
    hints = given(message.hints)
    if core.predictor is None:
        return hints
    return core.predictor.recalled(hints, chain.parent + chain.keys)


def count(core: Core, hints: Hints | None) -> None:
    """Count a request by what it told."""
    for name in () if hints is None else hints.__struct_fields__:
        if getattr(hints, name) != getattr(NO_HINTS, name):
            core.counters[f"hints_{name.removesuffix('_s')}"] += 1


def for_each(tree: Tree, found: list[Stretch], hints: Hints) -> list[Hints]:
    """Hints for each of these stretches of one chain, which are in its order.

    The end of a session concerns the pages that are its own alone, the last ones: where some other
    chain goes on from a page, that page and those above it have other readers.
    """
    if not hints.session_closed:
        return [hints] * len(found)
    told, below = [msgspec.structs.replace(hints, session_closed=False)] * len(found), None
    for at in reversed(range(len(found))):
        run, end = found[at].run, found[at].page + found[at].count
        if end < len(run) or any(child is not below for child in tree.children(run)):
            break
        told[at], below = hints, run
    return told
