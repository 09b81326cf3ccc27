"""Which pages go into one stripe, and what happens when their parity cannot be hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.ids import ROOT_PARENT
from kvstore.namespace import open_layout
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import CheckExtents
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.operator import PoliciesInForce, SetPolicy
from kvstore.wire.messages.puts import BeginPut, PutChain
from kvstore.wire.messages.stripes import HashParity, ParityHashed
from master import stripe_making
from master.events import CommandAnswered
from master.status import status
from master.stripes import PARITY
from tests.unit.master_rig import OpenedNamespace, chain, failure, small_content, small_layout
from tests.unit.striped_pools import COLD_AFTER_S, data_of, pool, put_pages, striped, stripes

if TYPE_CHECKING:
    from master.events import Command
    from tests.unit.master_rig import Rig


def asked(rig: Rig) -> list[Command]:
    """Questions about parity that are held."""
    return [each for each in rig.commands if isinstance(each.message, HashParity)]


def held(workers: int = 4, pages: int = 8) -> Rig:
    """Cold pages whose parity is asked for, and nobody answers."""
    rig = pool(workers)
    put_pages(rig.open_namespace(), pages)
    rig.holds_commands = True
    rig.pass_time(5.0)
    return rig


def test_data_and_who_hashes_are_on_hosts_that_differ_and_what_is_read_is_leased() -> None:
    rig = held()
    for command in asked(rig):
        question = command.message
        assert isinstance(question, HashParity)
        hosts = {ref.host for ref in question.segments}
        worker = next(w for w in rig.workers.values() if w.session == command.session)
        assert len(hosts) == len(question.shards) == 2
        assert worker.name not in hosts
        for shard in question.shards:
            run = rig.master.core.tree(1).get(shard.key)
            assert run is not None
            assert run.leased_until_s > rig.now - 3.0


def test_no_more_is_asked_at_once_than_the_bound() -> None:
    rig = held(pages=40)
    assert len(asked(rig)) == len(rig.master.core.stripes.making) == stripe_making.MAKING_MAX


def test_nothing_is_written_before_the_stripe_is_durable() -> None:
    rig = pool(4)
    striped(rig)
    written, known = rig.master.core.counters["shards_rebuilt"], len(stripes(rig))
    rig.holds_persists = True
    put_pages(rig.open_namespace(), 8, seed=300)
    rig.pass_time(6.0)
    assert len(stripes(rig)) > known
    assert rig.master.core.counters["shards_rebuilt"] == written
    rig.holds_persists = False
    rig.store_all()
    rig.pass_time(2.0)
    assert rig.master.core.counters["shards_rebuilt"] > written


@pytest.mark.parametrize("reply", [
    None, ParityHashed(b"", b""), ParityHashed(b"\0", b"x" * 8), ParityHashed(bytes(2), b""),
    ParityHashed(bytes(2), b"x" * 16), ParityHashed(bytes([0, Outcome.TRANSPORT]), b""),
])  # fmt: skip
def test_without_a_whole_answer_no_stripe_is_made(reply: ParityHashed | None) -> None:
    rig = held()
    command = asked(rig)[0]
    rig.commands.remove(command)
    rig.send(CommandAnswered(command.command, reply))
    assert stripes(rig) == []
    assert rig.master.core.counters["stripes_failed"] == 1
    rig.holds_commands = False
    rig.obey_all()
    rig.pass_time(12.0)
    assert stripes(rig), "they are tried again"


def test_data_that_does_not_verify_is_checked_by_its_own_worker() -> None:
    rig = held()
    command = asked(rig)[0]
    rig.commands.remove(command)
    outcomes = bytes([Outcome.OK, Outcome.CHECKSUM])
    rig.send(CommandAnswered(command.command, ParityHashed(outcomes, b"")))
    checks = [c.message for c in rig.commands if isinstance(c.message, CheckExtents)]
    assert len(checks) == 1
    question = command.message
    assert isinstance(question, HashParity)
    shard = question.shards[1]
    assert checks[0].segment == question.segments[shard.segment].segment
    assert int.from_bytes(checks[0].offsets, "little") == shard.offset


def test_a_page_that_went_meanwhile_makes_no_harm() -> None:
    rig = held()
    command = asked(rig)[0]
    question = command.message
    assert isinstance(question, HashParity)
    rig.open_namespace().remove(question.shards[0].key)
    rig.holds_commands = False
    rig.obey_all()
    rig.pass_time(12.0)
    listed = {key for each in stripes(rig) for key in data_of(each)}
    assert question.shards[0].key not in listed


def test_pages_of_two_tenants_are_never_in_one_stripe() -> None:
    """I2: whoever reads a degraded page reads the bytes of all."""
    rig = pool(4)
    spaces: list[OpenedNamespace] = []
    for tenant in ("tenant", "other"):
        content, layout = small_content(tenant=tenant), small_layout()
        session = rig.open("engine", tenant, tenant)
        opened = rig.ask(session, OpenNamespace(content, layout))
        assert isinstance(opened, NamespaceOpened)
        space = OpenedNamespace(rig, open_layout(content, layout), opened.ordinal)
        spaces.append(space)
        for number in range(6):
            key = chain(900 + 10 * space.ordinal + number, 1)
            rig.engine = session
            space.put(key)
    rig.pass_time(8.0)
    assert {m.namespace for s in stripes(rig) for m in s.members[: s.k]} == {
        space.ordinal for space in spaces
    }
    for stripe in stripes(rig):
        assert len({member.namespace for member in stripe.members[: stripe.k]}) == 1


def test_nobody_can_put_into_the_namespace_of_parity() -> None:
    rig = pool(4)
    striped(rig)
    chains = (PutChain(ROOT_PARENT, chain(3, 1)),)
    put = BeginPut(b"r" * 16, PARITY.id, chains, (0,), (4096,), 5.0)
    assert failure(rig.ask(rig.engine, put)).code == "access_denied"


def policy(rig: Rig, **parameters: object) -> PoliciesInForce | str:
    """What an operator is told who sets parameters; or why not."""
    operator = rig.open("operator", "", "cli")
    wish = SetPolicy("erasure", "reed-solomon", {name: str(v) for name, v in parameters.items()})
    reply = rig.ask(operator, wish)
    return reply if isinstance(reply, PoliciesInForce) else failure(reply).text


def test_wider_stripes_than_there_are_hosts_are_refused_with_both_numbers() -> None:
    rig = pool(5)
    told = policy(rig, k="4", m="2")
    assert told == "k + m: got 6, want at most 5: so many hosts lend drives"
    told = policy(rig, k="5")
    assert told == "k + m: got 6, want at most 5: so many hosts lend drives"
    assert rig.master.core.erasure.policy.code is not None
    assert rig.master.core.erasure.policy.code.k == 2, "nothing has changed"


def test_a_code_that_is_changed_holds_for_stripes_from_then_on() -> None:
    rig = pool(5)
    striped(rig, 6)
    before = {stripe.number for stripe in stripes(rig)}
    assert isinstance(policy(rig, k="3", m="2"), PoliciesInForce)
    put_pages(rig.open_namespace(), 12, seed=300)
    rig.pass_time(8.0)
    codes = {(s.k, s.m) for s in stripes(rig) if s.number not in before}
    assert codes == {(3, 2)}
    assert {(s.k, s.m) for s in stripes(rig) if s.number in before} == {(2, 1)}


def test_what_is_striped_stays_so_when_no_more_is_to_be() -> None:
    rig = pool(5)
    keys = striped(rig, 8)
    before = {stripe.number for stripe in stripes(rig)}
    operator = rig.open("operator", "", "cli")
    rig.ask(operator, SetPolicy("erasure", "off", {}))
    put_pages(rig.open_namespace(), 8, seed=300)
    rig.pass_time(10.0)
    assert {stripe.number for stripe in stripes(rig)} == before
    rig.workers["w0"].leave()
    rig.pass_time(10.0)
    assert rig.open_namespace().probe(b"".join(keys)) == b"\1" * 8


def test_drives_that_are_full_make_no_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pool(4)
    monkeypatch.setattr(stripe_making, "_share", lambda _: rig.tunables.watermark_low)
    striped(rig)
    assert stripes(rig) == []
    assert rig.master.core.stripes.lacks == "1 more hosts with room on a drive"


def test_what_is_told_of_a_search_in_vain_holds_until_something_is_found() -> None:
    rig = pool(4)
    space = rig.open_namespace()
    told = set()
    for _ in range(20):
        rig.pass_time(0.25)
        told.add(status(rig.master.core).stripes.lacks)
    assert told == {"", "nothing more on drives is cold enough"}
    told.clear()
    for _ in range(20):
        rig.pass_time(0.25)
        told.add(status(rig.master.core).stripes.lacks)
    assert told == {"nothing more on drives is cold enough"}
    put_pages(space, 24)
    rig.pass_time(COLD_AFTER_S + 3.0)
    assert stripes(rig)
