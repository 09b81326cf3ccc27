"""An inference worker: a model that computes prompts, answers, or both, behind a gateway.

    python -m workers.serve --role prefill|decode|both --master HOST:PORT

A client of the pool with a model of its own. Owns the order of start and end: the model is loaded
and the server listens before the fleet hears of this worker; at a SIGTERM what runs is handed over
to others first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvstore.announcement import Announcement
from kvstore.client.store import KVStore
from kvstore.connectors.transformers import PooledPrefix
from kvstore.errors import BadValue
from kvstore.rpc.address import bind, bound_address
from kvstore.rpc.identity import this_host
from kvstore.startup import run_server
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet
from workers.batching import engine_of
from workers.engine import ROWS_MAX
from workers.engine_options import load_model, model_parser, secret_of, tokenizer_folder
from workers.generation import warm_up
from workers.serve_batch import Batch
from workers.serve_decode import DecodeDesk
from workers.serve_http import Desk
from workers.serve_kv import TicketKV
from workers.serve_member import Membership
from workers.serve_messages import About
from workers.serve_prefill import PrefillDesk
from workers.serve_proof import Doorkeeper
from workers.serve_roles import DECODE, PREFILL, Roles, in_role
from workers.serve_standing import serve_until_asked
from workers.tracing import name_requests, spans_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import Running
    from workers.generation import LanguageModel

ROLES: Final = (PREFILL, DECODE, "both")
CAPACITY_TOKENS: Final = 65_536
CALLS_AT_ONCE: Final = 32


class Worker:
    """The parts of one inference worker."""

    def __init__(
        self, options: argparse.Namespace, language: LanguageModel, store: KVStore, where: str
    ) -> None:
        """Join the fleet. Raises what the master refuses."""
        self._store = store
        prefix = PooledPrefix(
            store, language.model, language.model_id, layer_groups=options.layer_groups
        )
        self._kv = TicketKV(store, prefix)
        self._namespace = prefix.namespace
        self._language = language
        self._does_both = options.role == "both" or options.switch_roles
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        computes = self._does_both or options.role == PREFILL
        self.prefill = self._prefill_desk() if computes else None
        self.batch, self.decode = self._decode_desk(options)
        wish = JoinFleet(
            self._namespace.id, options.name, options.role, where, this_host(), "", "",
            options.capacity_tokens, options.rows, (), options.switch_roles,
        )  # fmt: skip
        self.roles = Roles(wish, self.prefill, self.decode)
        own = in_role(wish, options.role)
        self.membership = Membership(store, own, self.report, self._drop)

    def about(self, options: argparse.Namespace) -> About:
        """What gateways have to know."""
        context = int(self._language.model.config.max_position_embeddings)
        room = options.capacity_tokens if self.decode else context
        return About(
            self._language.model_id, self._namespace.content, self._namespace.layout,
            min(context, room), tokenizer_folder(options.model),
        )  # fmt: skip

    def report(self, member: Member) -> FleetBeat:
        """The present state."""
        prefill, decode = self.prefill, self.decode
        # Prompts of requests that run here from beginning to end are computed in the batch.
        computing = [each for each in (prefill, self.batch) if each]
        return FleetBeat(
            member.namespace, member.worker, member.life,
            queued_tokens=sum(each.queued_tokens for each in computing),
            tokens_per_s=max(each.tokens_per_s for each in computing),
            step_s=self.batch.step_s if self.batch else 0.0,
            link_bytes_per_s=decode.link_bytes_per_s if decode else 0.0,
            rtt_s=0.0,
            running=decode.running() if decode else (),
            is_draining=self.roles.is_draining,
        )  # fmt: skip

    def close(self) -> None:
        """End its threads; those of decoding while the loop is there that tokens go to."""
        if self.prefill is not None:
            self.prefill.close()
        if self.decode is not None:
            self.decode.close()
        if self.batch is not None:
            self.batch.close()
        self.membership.close()

    def _member(self) -> Member:
        return self.membership.member

    def _drop(self, claims: tuple[Running, ...]) -> None:
        if self.decode is not None:
            self.decode.drop(claims)

    def _prefill_desk(self) -> PrefillDesk:
        return PrefillDesk(self._language, self._store, self._kv, self._member)

    def _decode_desk(self, options: argparse.Namespace) -> tuple[Batch | None, DecodeDesk | None]:
        if not (self._does_both or options.role == DECODE):
            return None, None
        loop = asyncio.get_running_loop()
        engine = engine_of(
            self._language.model, capacity_tokens=options.capacity_tokens, rows_max=options.rows
        )

        def broken(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._break, error)

        batch = Batch(engine, broken)
        stop = frozenset({self._language.chat.end_token})
        return batch, DecodeDesk(self._store, self._kv, batch, self._member, stop)

    def _break(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


async def serve(options: argparse.Namespace) -> None:
    """Run until a signal, or a bug of the batch's, ends it."""
    loop = asyncio.get_running_loop()
    secret = secret_of(options)
    loop.set_default_executor(ThreadPoolExecutor(CALLS_AT_ONCE))
    async with AsyncExitStack() as undo:
        store = undo.enter_context(
            KVStore.connect(options.master, tenant=options.tenant, secret=secret, name=options.name)
        )
        sock = undo.enter_context(bind(options.listen, secret))
        language = load_model(options.model)
        if options.threads:
            torch.set_num_threads(options.threads)
        warm_up(language)
        where = bound_address(sock)
        worker = Worker(options, language, store, where)
        undo.callback(worker.close)
        door = Doorkeeper(secret)
        vocabulary = language.model.get_input_embeddings().num_embeddings
        spans = spans_of(os.environ, options.name)
        undo.push_async_callback(asyncio.to_thread, spans.close)
        desk = Desk(worker.about(options), door, worker.prefill, worker.decode, vocabulary, spans)
        announced = Announcement(options.name, os.getpid(), "", where, worker=options.name)
        await serve_until_asked(undo, worker, desk.application(), sock, announced, options.data_dir)


def run(arguments: Sequence[str]) -> None:
    """Parse the command line and serve."""
    parser = model_parser("workers.serve", "Computes prompts, answers, or both.")
    parser.add_argument("--role", choices=ROLES, default="both")
    parser.add_argument("--name", required=True, metavar="NAME", help="unique in its fleet")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--tenant", default="default", metavar="NAME")
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="announce the address there, as NAME.json"
    )
    parser.add_argument(
        "--capacity-tokens", type=int, default=CAPACITY_TOKENS, metavar="N",
        help="KV tokens of all answers that run at once",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="of the model; 0 for one a core"
    )
    parser.add_argument(
        "--rows", type=int, default=ROWS_MAX, metavar="N", help="answers that run at once"
    )
    parser.add_argument(
        "--layer-groups", type=int, default=1, metavar="N",
        help="hand a prompt over by so many groups of layers; the same in all of a fleet",
    )  # fmt: skip
    parser.add_argument(
        "--switch-roles", action="store_true",
        help="change between prefill and decode when the master asks for it",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.switch_roles and options.role == "both":
        raise BadValue("switch_roles", "both", "a worker of role prefill or decode")
    for field in ("capacity_tokens", "rows", "layer_groups"):
        if getattr(options, field) < 1:
            raise BadValue(field, getattr(options, field), "at least 1")
    name_requests(logging.getLogger().handlers)
    asyncio.run(serve(options))


def main() -> None:
    """Run the program; ends the process."""
    run_server("workers.serve", run)


if __name__ == "__main__":
    main()
