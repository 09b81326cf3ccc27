"""The agent of a vLLM server: it makes the server one of a fleet's inference workers.

    python -m workers.vllm_agent --name NAME --role prefill|decode|both --vllm URL \\
      --description FILE --master HOST:PORT

Runs beside its server, which has kvharbor's connector and writes that description. A gateway in
front of the fleet sends tickets here, and the agent asks the server. It moves no page and loads no
model. It ends when its server does, so that the fleet goes on with others; whoever starts servers
starts their agents.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.announcement import Announcement
from kvstore.block_hashes import SHA256_CBOR, Hashing, check_hashing
from kvstore.client.store import KVStore
from kvstore.connectors.engine_namespace import namespaces, of_text
from kvstore.connectors.vllm.fields import seed_of
from kvstore.errors import BadValue, ConfigError, Unavailable
from kvstore.namespace import Attention
from kvstore.rpc.address import bind, bound_address
from kvstore.rpc.identity import this_host
from kvstore.startup import run_server
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet
from workers.chat_formats import chat_of
from workers.engine_options import pool_parser, secret_of
from workers.serve_http import Desk
from workers.serve_member import Membership
from workers.serve_messages import About
from workers.serve_proof import Doorkeeper
from workers.serve_roles import DECODE, PREFILL, Roles, in_role
from workers.serve_standing import serve_until_asked
from workers.tracing import name_requests, spans_of
from workers.vllm_desks import Told, VllmDecode, VllmPages, VllmPrefill
from workers.vllm_server import VllmServer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore.client.tickets import Member
    from kvstore.wire.messages.tickets import Running
    from workers.vllm_server import Served

ROLES: Final = (PREFILL, DECODE, "both")
CAPACITY_TOKENS: Final = 65_536
ROWS_MAX: Final = 64
CALLS_AT_ONCE: Final = 32
START_S: Final = 600.0
"""Time for the server to load its model."""
LOOK_EVERY_S: Final = 1.0
LOOKS_MAX: Final = 3
"""Times in a row that the server does not say it is well; then it has gone."""

LOG: Final = logging.getLogger(__name__)


def pages_of(description: str) -> VllmPages:
    """What the server's KV is called, by what its connector wrote. BadValue: what cannot be.

    The fleet's pages are those of the first group that keeps whole chains: tickets keep these from
    eviction, those of windows come and go as they do.
    """
    fields = of_text(description)
    hashing = Hashing(fields.hash_algorithm, seed_of(fields.hash_seed))
    if hashing.algorithm != SHA256_CBOR:
        want = f"{SHA256_CBOR}: a server started with --prefix-caching-hash-algo {SHA256_CBOR}"
        raise BadValue("hash_algorithm", hashing.algorithm, want)
    check_hashing(hashing)
    kinds = [group.attention for group in fields.groups]
    number = next((i for i, kind in enumerate(kinds) if kind is not Attention.SLIDING), None)
    if number is None:
        raise BadValue("groups", kinds, "one at least that keeps whole prefixes")
    return VllmPages(namespaces(fields), number, hashing)


class Agent:
    """The parts of one agent."""

    def __init__(
        self,
        options: argparse.Namespace,
        store: KVStore,
        server: VllmServer,
        pages: VllmPages,
        about: About,
        where: str,
    ) -> None:
        """Join the fleet. Raises what the master refuses."""
        opened = store.open(pages.namespace.content, pages.namespace.layout)
        end_token = chat_of(about.tokenizer).end_token
        told = Told(store, lambda: self.membership.member)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.prefill, self.decode = None, None
        if options.role != DECODE:
            self.prefill = VllmPrefill(server, pages, told, end_token)
        if options.role != PREFILL:
            self.decode = VllmDecode(server, pages, told, end_token)
        wish = JoinFleet(
            opened.namespace.id, options.name, options.role, where, this_host(), "", "",
            options.capacity_tokens, options.rows,
        )  # fmt: skip
        self.roles = Roles(wish, self.prefill, self.decode)
        own = in_role(wish, options.role)
        self.membership = Membership(store, own, self._report, self._drop)
        self._server = server

    async def look_after(self) -> None:
        """Until the server has gone; then this agent is broken."""
        looks = 0
        while looks < LOOKS_MAX:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._server.check()
                looks = 0
            except Unavailable as error:
                LOG.warning("%s", error)
                looks += 1
        self.broken.set_exception(Unavailable("the vLLM server has gone"))

    def _report(self, member: Member) -> FleetBeat:
        prefill, decode = self.prefill, self.decode
        return FleetBeat(
            member.namespace, member.worker, member.life,
            queued_tokens=prefill.queued_tokens if prefill else 0,
            tokens_per_s=prefill.tokens_per_s if prefill else 0.0,
            step_s=decode.step_s if decode else 0.0,
            link_bytes_per_s=0.0,
            rtt_s=0.0,
            running=decode.running() if decode else (),
            is_draining=self.roles.is_draining,
        )  # fmt: skip

    def _drop(self, claims: tuple[Running, ...]) -> None:
        if self.decode is not None:
            self.decode.drop(claims)


async def awaited(server: VllmServer) -> Served:
    """What the server has, once it is well. Unavailable when it is not within START_S."""
    ends_s = asyncio.get_running_loop().time() + START_S
    while True:
        try:
            await server.check()
            return await server.served()
        except Unavailable:
            if asyncio.get_running_loop().time() > ends_s:
                raise
        await asyncio.sleep(LOOK_EVERY_S)


async def serve(options: argparse.Namespace) -> None:
    """Run until a signal, or the server's end, ends it."""
    secret = secret_of(options)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CALLS_AT_ONCE))
    async with AsyncExitStack() as undo:
        store = undo.enter_context(
            KVStore.connect(options.master, tenant=options.tenant, secret=secret, name=options.name)
        )
        sock = undo.enter_context(bind(options.listen, secret))
        server = VllmServer(options.vllm)
        undo.push_async_callback(server.close)
        served = await awaited(server)
        pages = pages_of(_read(options.description))
        tokenizer = "" if options.tokenizer is None else str(options.tokenizer)
        about = About(
            served.id, pages.namespace.content, pages.namespace.layout, served.max_model_len,
            tokenizer, pages.hashing,
        )  # fmt: skip
        where = bound_address(sock)
        agent = Agent(options, store, server, pages, about, where)
        undo.callback(agent.membership.close)
        looking = asyncio.ensure_future(agent.look_after())
        undo.callback(looking.cancel)
        spans = spans_of(os.environ, options.name)
        undo.push_async_callback(asyncio.to_thread, spans.close)
        vocabulary = chat_of(tokenizer).vocabulary
        desk = Desk(about, Doorkeeper(secret), agent.prefill, agent.decode, vocabulary, spans)
        announced = Announcement(options.name, os.getpid(), "", where, worker=options.name)
        await serve_until_asked(undo, agent, desk.application(), sock, announced, options.data_dir)


def _read(description: Path) -> str:
    try:
        return description.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"description {description}: {error.strerror}; the server's connector writes it where "
            "description_file in kv_connector_extra_config says"
        ) from error


def run(arguments: Sequence[str]) -> None:
    """Parse the command line and serve."""
    parser = pool_parser("workers.vllm_agent", "Makes a vLLM server one of a fleet's workers.")
    parser.add_argument("--name", required=True, metavar="NAME", help="unique in its fleet")
    parser.add_argument("--role", choices=ROLES, default="both")
    parser.add_argument(
        "--vllm", default="http://127.0.0.1:8000", metavar="URL", help="of the server's API"
    )
    parser.add_argument(
        "--description", type=Path, required=True, metavar="FILE",
        help="what the server's connector has written: its description_file",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER",
        help="of the model's tokenizer and chat template; without, a token is a byte",
    )  # fmt: skip
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--tenant", default="default", metavar="NAME")
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="announce the address there, as NAME.json"
    )
    parser.add_argument(
        "--capacity-tokens", type=int, default=CAPACITY_TOKENS, metavar="N",
        help="KV tokens of all answers that run at once: what vLLM logs as its KV cache size",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=int, default=ROWS_MAX, metavar="N",
        help="answers that run at once: vLLM's --max-num-seqs",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for field in ("capacity_tokens", "rows"):
        if getattr(options, field) < 1:
            raise BadValue(field, getattr(options, field), "at least 1")
    name_requests(logging.getLogger().handlers)
    asyncio.run(serve(options))


def main() -> None:
    """Run the program; ends the process."""
    run_server("workers.vllm_agent", run)


if __name__ == "__main__":
    main()
