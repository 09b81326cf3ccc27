"""A ticket from admission to its end in a running pool, by both stores and the command line."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import Attention, CacheGroup, Content, KVStore, Layout
from kvstore.aio import AsyncKVStore
from kvstore.client import tickets
from kvstore.client.descriptor import check_descriptor
from kvstore.client.tickets import HandOver, TicketRequest, tail_key
from kvstore.errors import Fenced, Throttled, UnknownTicket
from kvstore.namespace import TAILS
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, Running, TailRef
from tests.cluster.up import kvharbor

if TYPE_CHECKING:
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import TicketOpened
    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GROUP = CacheGroup(Attention.FULL, 1, 1, 8, 8)
CONTENT = Content("default", "tickets", "r", "", "float16", (GROUP,), "rope")
LAYOUT = Layout(page_tokens=128)
PAGE = 4096
PROMPT = range(128 * 2 + 10)
TAIL_BYTES = 10 * PAGE // 128


def joined(store: KVStore, space: OpenedNamespace, role: str) -> Member:
    """A worker of the fleet that has said that it lives."""
    namespace, batch = space.namespace.id, 4 * (role == "decode")
    where = f"{role}:1", "host", "", ""
    wish = JoinFleet(namespace, role, role, *where, 1000 * bool(batch), batch)
    member = store.carry_out(tickets.join_fleet(wish))
    beat(store, member)
    return member


def beat(store: KVStore, member: Member, *running: Running) -> tuple[int, ...]:
    """What it is told of that is not its own."""
    figures = 0, 0.0, 0.0, 0.0, 0.0
    message = FleetBeat(member.namespace, member.worker, member.life, *figures, running)
    return store.carry_out(tickets.beat(message)).fenced


def staged(
    store: KVStore, space: OpenedNamespace, opened: TicketOpened, prefill: Member
) -> HandOver:
    """What the prefill worker leaves."""
    store.carry_out(tickets.begin_prefill(opened.ticket, prefill))
    chain, source = space.chain(PROMPT), store.buffer(2 * PAGE)
    store.put(space, chain, source, (0, PAGE))
    own = store.open_opaque(TAILS, ttl_s=60.0)
    key = tail_key(own.namespace.id, opened.ticket, 1)
    store.put_objects(own, type(chain)(key), source, (0,), TAIL_BYTES)
    done = HandOver(chain, (7,), TailRef(own.namespace.id, key, TAIL_BYTES))
    store.carry_out(tickets.stage_ticket(opened.ticket, prefill, done))
    return done


def told(pool: Up) -> dict[str, Any]:
    """What the command says."""
    done = kvharbor("--json", "tickets", f"--master={pool.master}")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_ticket_goes_from_prefill_to_decode(shared_pool: Up) -> None:
    asyncio.run(_passage(shared_pool))


async def _passage(pool: Up) -> None:
    store = await asyncio.to_thread(KVStore.connect, pool.master)
    gateway = await AsyncKVStore.connect(pool.master)
    space = store.open(CONTENT, LAYOUT)
    request = TicketRequest(space, "chat-1", space.chain(PROMPT), len(PROMPT), 20, 5.0, 60.0)
    with pytest.raises(Throttled):
        await gateway.carry_out(tickets.open_ticket(request))
    prefill, decode = joined(store, space, "prefill"), joined(store, space, "decode")
    opened = await gateway.carry_out(tickets.open_ticket(request))
    assert await gateway.carry_out(tickets.open_ticket(request)) == opened
    waiting = asyncio.create_task(gateway.carry_out(tickets.await_route(opened.ticket, 0)))
    done = await asyncio.to_thread(staged, store, space, opened, prefill)
    routed = await waiting
    assert routed is not None
    assert routed.where == "decode:1"
    claimed = store.carry_out(tickets.claim_ticket(opened.ticket, routed.route, decode))
    assert check_descriptor(claimed, space.namespace, PROMPT, done.tokens) == 10
    row = told(pool)["rows"][0]
    assert (row["request"], row["state"], row["decode"]) == ("chat-1", "claimed", "decode")
    with pytest.raises(Fenced):
        store.carry_out(tickets.install_ticket(opened.ticket, claimed.token - 1))
    store.carry_out(tickets.install_ticket(opened.ticket, claimed.token))
    assert beat(store, decode, Running(opened.ticket, claimed.token, 270), Running(5, 6, 7)) == (5,)
    store.carry_out(tickets.finish_ticket(opened.ticket, claimed.token))
    with pytest.raises(UnknownTicket):
        await gateway.carry_out(tickets.await_route(opened.ticket, routed.route))
    for member in (prefill, decode):
        store.carry_out(tickets.leave_fleet(member))
    left = await gateway.carry_out(tickets.list_tickets())
    assert (left.tickets, left.workers, left.staging_bytes) == (0, (), 0)
    store.close()
    await gateway.close()
