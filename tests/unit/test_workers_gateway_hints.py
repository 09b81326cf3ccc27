"""What a client says of its chain's future reaches the pool when its answer has ended."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.block_hashes import OWN_HASHING, chain_of
from kvstore.errors import Unavailable
from kvstore.hints import Hints
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.reads import GiveHints
from tests.unit.client_scripts import opened
from tests.unit.relay_rig import PROMPT, STAGED, TICKET, TOKENS, WISH, Case, lines
from workers.gateway_relay import Passage

HINTS = Hints(session_closed=True, priority=1)


def hinted() -> Case:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))
    case.passage = Passage(case.fleet, "r/1", msgspec.structs.replace(WISH, hints=HINTS), 3)
    return case


def test_they_are_told_of_prompt_and_answer_behind_the_end() -> None:
    case = hinted()
    assert case.run() == TOKENS
    chain = chain_of(opened().namespace, (*PROMPT, *TOKENS), OWN_HASHING)
    assert len(chain) > len(chain_of(opened().namespace, PROMPT, OWN_HASHING))
    told = GiveHints(opened().namespace.id, b"".join(chain), HINTS)
    assert case.master.asked[-2:] == [wire.FinishTicket(TICKET, 5), told]


def test_they_are_told_of_an_answer_that_fails_too() -> None:
    case = hinted()
    case.workers.prefills[:] = [Unavailable("x")] * 9
    with pytest.raises(Unavailable):
        case.run()
    assert len(case.master.heard(GiveHints)) == 1


def test_a_pool_that_cannot_be_told_keeps_nobody_from_an_answer() -> None:
    case = hinted()
    case.master.refusals[GiveHints] = Unavailable("away")
    assert case.run() == TOKENS


def test_without_hints_nothing_is_said() -> None:
    case = Case([STAGED], lines(5, 1, 2, 3, 4))
    case.run()
    assert case.master.heard(GiveHints) == []
