"""The plan of a put, driven by a scripted master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Refused, RefusedReason, Stored
from kvstore.client.steps import Ask, IngestPages, drive
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.errors import DeadlineExceeded, MalformedMessage, Unavailable
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.page import PageChain
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import AbortPut, BeginPut, PageRange, PutPlans, RefusedRange
from kvstore.wire.messages.reads import Probe, Probed
from tests.fakes import payload
from tests.unit.client_scripts import Script, begin_put, keys_asked, opened, plan, plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome
    from kvstore.transfer.transport import IngestSpan
    from kvstore.wire.messages.base import Message

SIZE = 4096
SPACE = Outcome.OUT_OF_SPACE
OTHERS = Outcome.IN_PROGRESS


def chain_of(pages: int, space: OpenedNamespace | None = None) -> PageChain:
    space = space or opened()
    return space.chain(range(pages * space.namespace.layout.page_tokens))


def put(
    script: Script,
    pages: int,
    *,
    space: OpenedNamespace | None = None,
    parts: tuple[int, ...] = (0,),
    wait: bool = True,
    timeout_s: float = 10.0,
) -> list[PutOutcome]:
    """Put `pages` pages that lie one after the other, part after part."""
    space = space or opened()
    chain = chain_of(pages, space)
    sources = []
    for nth, part in enumerate(parts):
        places = tuple((nth * pages + i) * SIZE for i in range(pages))
        script.fill(chain, places, SIZE, part)
        sources.append(PartSource(part, SIZE, places))
    deadline_s = script.clock.now_s() + timeout_s
    request = PutRequest(space, chain, tuple(sources), deadline_s, wait)
    return drive(put_steps(request, script.clock, script.new_id), script)


def test_a_batch_takes_one_question_and_stores_every_page() -> None:
    script = Script().will(plans(plan(0, 3, 101), plan(3, 1, 102, at=5)))
    assert put(script, 4) == [Stored(visible=True)] * 4
    assert len(script.asked) == 1
    (begin,) = map(begin_put, script.asked)
    assert [(chain.parent, keys_asked(begin)) for chain in begin.chains] == [(ROOT_PARENT, 4)]
    assert (begin.parts, begin.part_bytes, begin.wait) == ((0,), (SIZE,), True)
    chain = chain_of(4)
    first, second = script.ingested
    assert (first.generation, first.parent, first.keys) == (101, ROOT_PARENT, chain.packed[:96])
    assert (second.generation, second.parent, second.keys) == (102, chain.key(2), chain.key(3))
    assert first.namespace_ordinal == 7
    assert first.token_count == 4
    assert script.transport.pages[("s0", 5 << 20)][0] == chain.key(3)


def test_no_pages_ask_nothing() -> None:
    script = Script()
    assert put(script, 0) == []
    assert not script.asked


def test_pages_that_are_there_are_not_moved() -> None:
    answer = plans(plan(2, 1, 9), present=(PageRange(0, 2, 0),))
    script = Script().will(answer)
    assert put(script, 3) == [AlreadyThere(), AlreadyThere(), Stored(visible=True)]
    assert [span.keys for span in script.ingested] == [chain_of(3).key(2)]


@pytest.mark.parametrize(
    "code",
    [Outcome.CHECKSUM, Outcome.TRANSPORT, Outcome.SOURCE_LOST, Outcome.FENCED, Outcome.STALE],
)
def test_a_failed_pull_is_given_up_and_planned_anew(code: Outcome) -> None:
    script = Script().will(plans(plan(0, 3, 50)), plans(plan(0, 1, 51, at=9)))
    script.transport.spoil[("s0", 4096)] = [code]
    assert put(script, 3) == [Stored(visible=True)] * 3
    assert script.asked[1] == AbortPut((50,))
    again = begin_put(script.asked[2])
    chain = chain_of(3)
    assert [(c.parent, c.keys) for c in again.chains] == [(chain.key(0), chain.key(1))]
    assert begin_put(script.asked[0]).request != again.request
    assert script.ingested[1].parent == chain.key(0)


def test_a_page_is_pulled_three_times_at_most() -> None:
    script = Script().will(*(plans(plan(0, 1, g)) for g in (1, 2, 3)))
    script.transport.spoil[("s0", 0)] = [Outcome.CHECKSUM] * 9
    assert put(script, 1) == [Refused(RefusedReason.CHECKSUM)]
    assert len(script.asked_of(BeginPut)) == limits.PULL_TRIES_MAX
    assert script.asked_of(AbortPut) == [AbortPut((g,)) for g in (1, 2, 3)]


def test_a_readers_lock_is_no_try() -> None:
    rounds = 10
    script = Script().will(*(plans(plan(0, 1, g)) for g in range(1, rounds + 2)))
    script.transport.spoil[("s0", 0)] = [Outcome.BUSY] * rounds
    assert put(script, 1) == [Stored(visible=True)]
    assert len(script.asked_of(BeginPut)) == rounds + 1


def test_a_closed_plan_is_not_aborted_but_planned_anew() -> None:
    script = Script().will(plans(plan(0, 1, 1)), plans(plan(0, 1, 2)))
    script.transport.spoil[("s0", 0)] = [Outcome.PLAN_CLOSED]
    assert put(script, 1) == [Stored(visible=True)]
    assert not script.asked_of(AbortPut)


@pytest.mark.parametrize("reason", [OTHERS, SPACE, Outcome.TOO_MANY_QUARANTINED])
def test_what_time_can_change_is_asked_again(reason: Outcome) -> None:
    refusal = RefusedRange(1, 2, 0, reason, 0.25)
    script = Script().will(
        plans(plan(0, 1, 1), refused=(refusal,)),
        plans(refused=(RefusedRange(0, 2, 0, reason, 0.25),)),
        plans(plan(0, 1, 2), present=(PageRange(1, 1, 0),)),
    )
    assert put(script, 3) == [Stored(visible=True), Stored(visible=True), AlreadyThere()]
    assert script.pauses == [0.25]
    assert [keys_asked(begin_put(m)) for m in script.asked] == [3, 2, 2]


def test_waiting_ends_at_the_deadline() -> None:
    def full(message: Message) -> Message:
        script.clock.advance(begin_put(message).timeout_s)
        return plans(refused=(RefusedRange(0, 2, 0, SPACE, 3.0),))

    script = Script().will(*[full] * 20)
    start_s = script.clock.now_s()
    assert put(script, 2, timeout_s=5.0) == [Refused(RefusedReason.OUT_OF_SPACE, 3.0)] * 2
    assert script.clock.now_s() == pytest.approx(start_s + 5.0)


def test_time_that_runs_out_on_asking_again_leaves_the_first_answer() -> None:
    refusal = RefusedRange(0, 2, 0, SPACE, 0.1)
    script = Script().will(plans(refused=(refusal,)), DeadlineExceeded("no answer"))
    assert put(script, 2) == [Refused(RefusedReason.OUT_OF_SPACE, 0.1)] * 2
    with pytest.raises(DeadlineExceeded):
        put(Script().will(DeadlineExceeded("no answer")), 2)
    one_refused = plans(refused=(RefusedRange(0, 1, 0, SPACE, 0.1),))
    with pytest.raises(DeadlineExceeded):
        put(Script().will(one_refused, DeadlineExceeded("no answer")), 2)


def test_without_waiting_a_refusal_is_final() -> None:
    answer = plans(plan(0, 1, 1), refused=(RefusedRange(1, 1, 0, OTHERS, 0.5),))
    script = Script().will(answer)
    assert put(script, 2, wait=False) == [
        Stored(visible=True),
        Refused(RefusedReason.IN_PROGRESS, 0.5),
    ]
    assert not begin_put(script.asked[0]).wait
    assert not script.pauses


def test_a_missing_parent_is_not_waited_for() -> None:
    script = Script().will(plans(refused=(RefusedRange(0, 2, 0, Outcome.PARENT_MISSING, 0.0),)))
    assert put(script, 2) == [Refused(RefusedReason.PARENT_MISSING)] * 2


def test_pages_whose_parent_made_room_while_they_waited_are_out_of_space() -> None:
    waiting = plans(plan(0, 1, 1), refused=(RefusedRange(1, 2, 0, SPACE, 0.5),))
    orphaned = plans(refused=(RefusedRange(0, 2, 0, Outcome.PARENT_MISSING, 0.0),))
    outcomes = put(Script().will(waiting, orphaned), 3)
    assert outcomes == [Stored(), *[Refused(RefusedReason.OUT_OF_SPACE, 0.5)] * 2]


def test_an_answer_without_content_does_not_spin() -> None:
    script = Script().will(*[plans()] * 10_000)
    assert put(script, 1, timeout_s=1.0) == [Refused(RefusedReason.DEADLINE)]
    assert len(script.asked) <= 101


def test_a_passed_deadline_asks_nothing() -> None:
    script = Script()
    assert put(script, 2, timeout_s=0.0) == [Refused(RefusedReason.DEADLINE)] * 2


def test_an_unreachable_master_is_an_error() -> None:
    with pytest.raises(Unavailable):
        put(Script().will(Unavailable("nobody")), 1)


def test_parts_are_put_together_and_a_refused_one_refuses_the_page() -> None:
    space = opened(tensor_parallel=2)
    script = Script().will(
        plans(
            plan(0, 2, 1),
            plan(1, 1, 2, part=1, at=3),
            present=(PageRange(0, 1, 1),),
        )
    )
    script.transport.spoil[("s0", 3 << 20)] = []
    assert put(script, 2, space=space, parts=(0, 1)) == [Stored(visible=True)] * 2
    assert [span.part for span in script.ingested] == [0, 1]

    script = Script().will(
        plans(plan(0, 2, 1), refused=(RefusedRange(0, 2, 1, SPACE, 1.0),)),
    )
    refused = Refused(RefusedReason.OUT_OF_SPACE, 1.0)
    assert put(script, 2, space=space, parts=(0, 1), wait=False) == [refused] * 2


def test_the_writer_of_some_parts_learns_what_is_visible() -> None:
    space = opened(tensor_parallel=2)
    script = Script().will(plans(plan(0, 2, 1, part=1)), Probed(b"\1\0"))
    assert put(script, 2, space=space, parts=(1,)) == [Stored(visible=True), Stored(visible=False)]
    assert script.asked[1] == Probe(space.namespace.id, chain_of(2, space).packed)


def test_a_retry_names_only_the_part_that_failed() -> None:
    space = opened(tensor_parallel=2)
    script = Script().will(
        plans(plan(0, 2, 1), plan(0, 2, 2, part=1, at=3)),
        plans(plan(0, 1, 3, part=1, at=4)),
    )
    script.transport.spoil[("s0", (3 << 20) + 4096)] = [Outcome.CHECKSUM]
    assert put(script, 2, space=space, parts=(0, 1)) == [Stored(visible=True)] * 2
    assert begin_put(script.asked[2]).parts == (1,)


def test_big_puts_are_cut_into_batches_with_the_right_parents() -> None:
    pages = limits.BATCH_PAGES_MAX + 10
    script = Script(SIZE)
    chain = PageChain(payload(b"keys", 0, pages * KEY_BYTES))
    request = PutRequest(
        opened(), chain, (PartSource(0, SIZE, (0,) * pages),), script.clock.now_s() + 10
    )
    script.will(plans(plan(0, limits.BATCH_PAGES_MAX, 1)), plans(plan(0, 10, 2, at=64)))
    assert drive(put_steps(request, script.clock, script.new_id), script) == [Stored()] * pages
    first, second = map(begin_put, script.asked)
    assert (keys_asked(first), keys_asked(second)) == (limits.BATCH_PAGES_MAX, 10)
    assert second.chains[0].parent == chain.key(limits.BATCH_PAGES_MAX - 1)


def test_a_refused_end_of_a_batch_ends_the_put() -> None:
    pages = 3 * limits.BATCH_PAGES_MAX
    script = Script(SIZE)
    chain = PageChain(bytes(pages * KEY_BYTES))
    request = PutRequest(
        opened(), chain, (PartSource(0, SIZE, (0,) * pages),), script.clock.now_s() + 10, wait=False
    )
    refused = RefusedRange(1, limits.BATCH_PAGES_MAX - 1, 0, SPACE, 2.0)
    script.will(plans(plan(0, 1, 1), refused=(refused,)))
    outcomes = drive(put_steps(request, script.clock, script.new_id), script)
    assert outcomes == [Stored(), *[Refused(RefusedReason.OUT_OF_SPACE, 2.0)] * (pages - 1)]
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        plans(plan(0, 3, 1)),
        plans(plan(-1, 1, 1)),
        plans(plan(0, 1, 1, part=5)),
        plans(present=(PageRange(0, 0, 0),)),
        plans(refused=(RefusedRange(1, 2, 0, SPACE, 0.0),)),
        Done(),
    ],
)
def test_an_answer_about_other_pages_is_malformed(answer: Message) -> None:
    script = Script().will(answer)
    with pytest.raises(MalformedMessage):
        put(script, 2)
    # What it planned all the same is not left to its timeout.
    spans = answer.spans if isinstance(answer, PutPlans) else ()
    assert script.asked_of(AbortPut) == [AbortPut((span.generation,)) for span in spans]


class Interrupted(Script):
    """Something ends each transfer, and the first so many questions that come after it."""

    def __init__(self, error: BaseException, questions: int = 0) -> None:
        super().__init__()
        self.error = error
        self.questions = questions
        self.takes_s = 0.0

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        self.clock.advance(self.takes_s)
        raise self.error

    def ask(self, message: Message, timeout_s: float) -> Message:
        reply = super().ask(message, timeout_s)
        if isinstance(message, AbortPut) and self.questions:
            self.questions -= 1
            raise self.error
        return reply


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, Unavailable])
@pytest.mark.parametrize("questions", [0, 1])
def test_a_put_that_is_interrupted_gives_its_plans_up(
    error: type[BaseException], questions: int
) -> None:
    script = Interrupted(error("now"), questions)
    script.will(plans(plan(0, 2, 101), plan(2, 1, 102, at=5)))
    with pytest.raises(error, match="now"):
        put(script, 3)
    assert script.asked_of(AbortPut) == [AbortPut((101, 102))]


def test_an_interrupted_put_whose_time_is_up_asks_nothing_more() -> None:
    script = Interrupted(KeyboardInterrupt())
    script.takes_s = 10.0
    with pytest.raises(KeyboardInterrupt):
        put(script.will(plans(plan(0, 1, 101))), 1, timeout_s=10.0)
    assert not script.asked_of(AbortPut)


def test_a_plan_that_nobody_carries_out_any_more_asks_nothing() -> None:
    script, space = Script(), opened()
    source = PartSource(0, SIZE, (0,))
    request = PutRequest(space, chain_of(1), (source,), script.clock.now_s() + 10.0)
    steps = put_steps(request, script.clock, script.new_id)
    assert isinstance(next(steps), Ask)
    assert isinstance(steps.send(plans(plan(0, 1, 101))), IngestPages)
    steps.close()


class Stuck(Script):
    """Everybody takes all the time that he is given; the first question alone is answered."""

    def ask(self, message: Message, timeout_s: float) -> Message:
        if self.asked:
            self.clock.advance(timeout_s)
            raise DeadlineExceeded(type(message).__name__)
        return super().ask(message, timeout_s)

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        self.clock.advance(timeout_s)
        return [bytes((Outcome.TRANSPORT,)) * len(span) for span in spans]


def test_a_put_among_the_dead_ends_by_its_deadline() -> None:
    script = Stuck()
    ends_s = script.clock.now_s() + 10.0
    outcomes = put(script.will(plans(plan(0, 2, 1))), 2, timeout_s=10.0)
    assert outcomes == [Refused(RefusedReason.TRANSPORT)] * 2
    assert script.clock.now_s() == pytest.approx(ends_s)


class Hung(Script):
    """The first worker that is asked to pull keeps silent for as long as it is waited for."""

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        if self.ingested:
            return super().ingest(spans, timeout_s)
        self.ingested += spans
        self.clock.advance(timeout_s)
        return [bytes((Outcome.TRANSPORT,)) * len(span) for span in spans]


def test_a_worker_that_hangs_costs_no_more_than_its_plans_last() -> None:
    script = Hung()
    began_s = script.clock.now_s()
    answers = plans(plan(0, 2, 1)), plans(plan(0, 2, 2))
    assert put(script.will(*answers), 2, timeout_s=600.0) == [Stored()] * 2
    assert script.clock.now_s() - began_s == pytest.approx(limits.put_timeout_s(2 * SIZE))


def test_what_no_one_could_tell_in_time_is_not_visible() -> None:
    script = Script().will(plans(plan(0, 2, 1)), DeadlineExceeded("no answer"))
    assert put(script, 2, space=opened(tensor_parallel=2)) == [Stored(visible=False)] * 2
