"""The HTTP side of an inference worker: its gateway's questions, checked and answered.

Owns aiohttp. A question without proof of the cluster secret is told the salt to prove it with. A
gateway that hangs up has its question cancelled at once.
"""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web

from kvstore.errors import AccessDenied, BadValue, CallerError, Fenced, KVStoreError, OutOfSpace
from workers.serve_messages import (
    ABOUT,
    BODY_BYTES_MAX,
    DECODE,
    PREFILL,
    PREPARE,
    DecodeAsk,
    PrefillAsk,
    PrepareAsk,
    Prepared,
    Trouble,
    Unwanted,
    check_tokens,
    decode,
    encode,
)
from workers.serve_proof import PROOF_HEADER, SALT_HEADER
from workers.tracing import TRACEPARENT, failed, request_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from workers.serve_messages import About, Line, PrefillDone
    from workers.serve_proof import Doorkeeper
    from workers.tracing import Spans

STATUS: Final[tuple[tuple[type[KVStoreError], int], ...]] = (
    (AccessDenied, 403),
    (Fenced, 409),
    (OutOfSpace, 503),
    (CallerError, 400),
)
DOWN: Final = 500
UNPROVED: Final = 401

LOG: Final = logging.getLogger(__name__)


class Prompts(Protocol):
    """What is needed of a prefill desk."""

    queued_tokens: int

    async def compute(self, ask: PrefillAsk, asked_s: float) -> PrefillDone:
        """Compute a prompt and stage it; who waits may be cancelled."""
        ...


class Answers(Protocol):
    """What is needed of a decode desk."""

    async def prepare(self, ask: PrepareAsk) -> None:
        """Pull a prompt while it is being computed."""
        ...

    def decode(self, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of one answer."""
        ...


class Desk:
    """What a worker answers to its gateways. It has a prefill desk, a decode desk, or both."""

    def __init__(
        self,
        about: About,
        door: Doorkeeper,
        prefill: Prompts | None,
        decode_desk: Answers | None,
        vocabulary: int,
        spans: Spans,
    ) -> None:
        """Tokens are below `vocabulary`."""
        self._about = about
        self._door = door
        self._prefill = prefill
        self._decode = decode_desk
        self._vocabulary = vocabulary
        self._spans = spans

    def application(self) -> web.Application:
        """The routes of what this worker does."""
        made = web.Application(client_max_size=BODY_BYTES_MAX)
        made.router.add_post(ABOUT, self._tell_about)
        if self._prefill is not None:
            made.router.add_post(PREFILL, self._prompt)
        if self._decode is not None:
            made.router.add_post(PREPARE, self._prompt_ahead)
            made.router.add_post(DECODE, self._ticket)
        return made

    async def _tell_about(self, request: web.Request) -> web.StreamResponse:
        body = await self._proved(request)
        return self._unproved() if body is None else web.Response(body=encode(self._about))

    async def _prompt(self, request: web.Request) -> web.StreamResponse:
        body = await self._proved(request)
        if body is None:
            return self._unproved()
        try:
            ask = decode(body, PrefillAsk)
            check_tokens(ask, self._vocabulary)
        except KVStoreError as error:
            return _refusal(error)
        with request_of(self._spans, "prefill", ask.request, request.headers.get(TRACEPARENT)):
            return await self._computed(ask)

    async def _computed(self, ask: PrefillAsk) -> web.StreamResponse:
        desk = self._prefill
        assert desk is not None
        desk.queued_tokens += len(ask.tokens)
        try:
            done = await desk.compute(ask, time.perf_counter())
        except (KVStoreError, Unwanted) as error:
            failed(error)
            return _refusal(error)
        finally:
            desk.queued_tokens -= len(ask.tokens)
        LOG.info("ticket %d: %d tokens, %d of them reused, first token after %.3f s",
            ask.ticket, len(ask.tokens), done.reused_tokens, done.queue_s + done.compute_s,
        )  # fmt: skip
        return web.Response(body=encode(done))

    async def _prompt_ahead(self, request: web.Request) -> web.StreamResponse:
        body = await self._proved(request)
        if body is None:
            return self._unproved()
        assert self._decode is not None
        try:
            ask = decode(body, PrepareAsk)
            check_tokens(ask, self._vocabulary)
        except KVStoreError as error:
            return _refusal(error)
        with request_of(self._spans, "prepare", ask.request, request.headers.get(TRACEPARENT)):
            LOG.info("ticket %d: ahead, route %d", ask.ticket, ask.route)
            try:
                await self._decode.prepare(ask)
            except KVStoreError as error:
                failed(error)
                return _refusal(error)
        return web.Response(body=encode(Prepared()))

    async def _ticket(self, request: web.Request) -> web.StreamResponse:
        body = await self._proved(request)
        if body is None:
            return self._unproved()
        try:
            ask = decode(body, DecodeAsk)
            check_tokens(ask, self._vocabulary)
        except KVStoreError as error:
            return _refusal(error)
        with request_of(self._spans, "decode", ask.request, request.headers.get(TRACEPARENT)):
            LOG.info("ticket %d: route %d", ask.ticket, ask.route)
            return await self._generated(request, ask)

    async def _generated(self, request: web.Request, ask: DecodeAsk) -> web.StreamResponse:
        assert self._decode is not None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            async with aclosing(self._decode.decode(ask)) as lines:
                async for line in lines:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(encode(line) + b"\n")
        except KVStoreError as error:
            failed(error)
            if not response.prepared:
                return _refusal(error)
            LOG.warning("ticket %d given up: %s", ask.ticket, error)
            if request.transport is not None:  # a stream that ends well says: somebody goes on
                request.transport.close()
            return response
        if not response.prepared:
            return _refusal(Fenced("the ticket has gone to another worker"))
        await response.write_eof()
        return response

    async def _proved(self, request: web.Request) -> bytes | None:
        """The question, if it comes from one who has the secret."""
        body = await request.read()
        header = request.headers.get(PROOF_HEADER, "")
        return body if self._door.admits(header, request.path, body) else None

    def _unproved(self) -> web.Response:
        trouble = Trouble(AccessDenied.code, "no proof of the cluster secret, or one used before")
        headers = {SALT_HEADER: self._door.salt}
        return web.Response(status=UNPROVED, body=encode(trouble), headers=headers)


def _refusal(error: Exception) -> web.Response:
    status = next((each for kind, each in STATUS if isinstance(error, kind)), DOWN)
    code = error.code if isinstance(error, KVStoreError) else "unwanted"
    if isinstance(error, BadValue) or status == DOWN:
        LOG.warning("refused: %s", error)
    return web.Response(status=status, body=encode(Trouble(code, str(error))))
