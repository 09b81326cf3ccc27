"""Where peers come in, whoever leads: the listeners of a master for the life of its process.

Hands each peer to the term in force when it came. Without one it tells peers where the leader is
and operators what it is itself, and does nothing else. Must not know how a term begins or ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.errors import NotLeader
from kvstore.rpc.identity import Role
from kvstore.rpc.server import Server
from kvstore.standing import Standing
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from kvstore.rpc.identity import ListenerIdentity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Hello
    from master.service import TermService


def standby_status(
    cluster: str,
    epoch: int = 0,
    master: str = "",
    standing: str = Standing.STANDBY.value,
    leader: tuple[str, ...] = (),
) -> Status:
    """Of a master that knows of no pool."""
    pool = 0.0, 0, 0, 0, 0, 0, (), (), ()
    return Status(cluster, epoch, *pool, {}, master=master, standing=standing, leader=leader)


class Reception:
    """All methods belong to the loop's thread."""

    def __init__(self, listener: ListenerIdentity) -> None:
        """Nothing listens yet, and no term is in force."""
        self._server = Server(listener, self._opened, self._requested, self._closed)
        self.status = standby_status(listener.cluster)
        """What operators are told while no term is in force."""
        self._term: TermService | None = None
        self._terms: dict[Peer, TermService] = {}
        """Of those peers that came in while a term was in force that still is."""

    async def listen(self, address: str) -> str:
        """Accept connections at this address; the address with its real port."""
        return await self._server.listen(address)

    async def close(self) -> None:
        """Stop listening and end every connection; the term in force hears of it."""
        await self._server.close()

    def show(self, status: Status) -> None:
        """This is what the master is from now on; its epoch is told to who is greeted."""
        self.status = status
        self._server.listener = replace(self._server.listener, epoch=status.epoch)

    def admit(self, term: TermService) -> None:
        """Let peers in to a term that begins. Those that met a standby come again, at once."""
        self._term = term
        self._turn_out(NotLeader())

    def dismiss(self) -> None:
        """The term in force is over: its sessions end, and it hears of nobody any more."""
        self._term = None
        self._terms.clear()
        self._turn_out(NotLeader())

    def _turn_out(self, reason: NotLeader) -> None:
        for peer in list(self._server.peers):
            peer.close(reason)

    def _opened(self, peer: Peer, hello: Hello) -> None:
        if self._term is not None:
            self._terms[peer] = self._term
            self._term.opened(peer, hello)

    def _requested(self, peer: Peer, request_id: int, message: Message) -> None:
        term = self._terms.get(peer)
        if term is not None:
            term.requested(peer, request_id, message)
            return
        assert peer.hello is not None, "who came in has said Hello"
        if isinstance(message, GetStatus) and peer.hello.role == Role.OPERATOR:
            peer.reply(request_id, self.status)
        else:
            raise NotLeader(self.status.leader)

    def _closed(self, peer: Peer) -> None:
        term = self._terms.pop(peer, None)
        if term is not None:
            term.closed(peer)
