"""The HTTP side of a gateway: OpenAI's completions and chats, streamed or whole.

Owns aiohttp's server. A client that hangs up cancels its request, wherever that is.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kvstore.errors import BadValue, KVStoreError, Unavailable
from workers.gateway_answers import DONE, UNAVAILABLE, Answering, error_body, event, status_of
from workers.gateway_metrics import GatewayMetrics
from workers.gateway_relay import Passage
from workers.gateway_requests import chat_completion, completion
from workers.gateway_text import AnswerText
from workers.serve_messages import BODY_BYTES_MAX
from workers.tracing import TRACEPARENT, failed, request_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from workers.chat_formats import ChatFormat
    from workers.gateway_relay import Fleet
    from workers.gateway_requests import Wish
    from workers.tracing import Spans

LOG: Final = logging.getLogger(__name__)
REQUEST_ID: Final = "X-Request-Id"
GOOD_ID: Final = re.compile(r"[\w.:\-]{1,100}", re.ASCII)
SEED_BITS: Final = 63
SUFFIX_BYTES: Final = 6
SSE: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass(frozen=True)
class Served:
    """The one model behind a gateway."""

    model: str
    chat: ChatFormat
    context_tokens: int


class Gateway:
    """What a gateway answers."""

    def __init__(self, fleet: Fleet, served: Served, spans: Spans) -> None:
        """Serve that fleet's model."""
        self._fleet = fleet
        self._spans = spans
        self._served = served
        self._metrics = GatewayMetrics()
        self._running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def application(self) -> web.Application:
        """All routes."""
        made = web.Application(client_max_size=BODY_BYTES_MAX)
        made.router.add_post("/v1/completions", self._completion)
        made.router.add_post("/v1/chat/completions", self._chat)
        made.router.add_get("/v1/models", self._models)
        made.router.add_get("/healthz", self._health)
        made.router.add_get("/metrics", self._page)
        return made

    async def drain(self) -> None:
        """Refuse what is new from now on; returns when all that runs has ended."""
        self._is_draining = True
        await self._idle.wait()

    async def _models(self, _: web.Request) -> web.StreamResponse:
        row = {"id": self._served.model, "object": "model", "created": 0, "owned_by": "kvharbor"}
        return _json({"object": "list", "data": [row]})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        is_serving = not self._is_draining
        return _json({"serving": is_serving}, 200 if is_serving else UNAVAILABLE)

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.page(), content_type="text/plain")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, chat_completion)

    async def _counted(
        self, request: web.Request, parse: Callable[[object, str, ChatFormat, int], Wish]
    ) -> web.StreamResponse:
        """Answer, and count how that ended."""
        given = request.headers.get(REQUEST_ID) or secrets.token_hex(SUFFIX_BYTES)
        request_id = given if GOOD_ID.fullmatch(given) else secrets.token_hex(SUFFIX_BYTES)
        # A client may say the same id twice: the fleet's is the request's own.
        inside = f"{request_id}/{secrets.token_hex(SUFFIX_BYTES)}"
        end = "gone"
        parent = request.headers.get(TRACEPARENT)
        with request_of(self._spans, request.path, inside, parent):
            try:
                with self._under_way():
                    if given != request_id:
                        want = "1 to 100 letters, digits, or any of _.:-"
                        raise BadValue(REQUEST_ID, given, want)
                    wish = parse(_decoded(await request.read()), *self._model())
                    response = await self._answer(request, inside, wish)
                    end = "complete"
                    return response
            except KVStoreError as error:
                end = str(status_of(error))
                failed(error)
                return _refusal(request_id, error)
            finally:
                self._metrics.requests.labels(end).inc()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Unavailable where it ends, and another gateway is to be asked."""
        if self._is_draining:
            raise Unavailable("this gateway takes nothing new: ask another one")
        self._running += 1
        self._idle.clear()
        try:
            with self._metrics.running.track_inprogress():
                yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _answer(self, request: web.Request, inside: str, wish: Wish) -> web.StreamResponse:
        """Raises what keeps the request from being answered."""
        request_id = inside.rpartition("/")[0]
        seed = secrets.randbits(SEED_BITS) if wish.seed is None else wish.seed
        passage = Passage(self._fleet, inside, wish, seed)
        answering = Answering(wish, request_id, self._served.model, int(time.time()))
        await passage.open()
        try:
            if wish.stream:
                return await self._stream(request, request_id, passage, answering)
            text = "".join([piece async for piece in self._pieces(passage, wish)])
            body = answering.whole(text, self._finish(passage), passage)
            return _json(body, headers={REQUEST_ID: request_id})
        finally:
            self._note(passage, wish)

    async def _stream(
        self, request: web.Request, request_id: str, passage: Passage, answering: Answering
    ) -> web.StreamResponse:
        """An event for each piece. An error after the first is an event, too."""
        response = web.StreamResponse(headers={**SSE, REQUEST_ID: request_id})
        try:
            async with aclosing(self._pieces(passage, passage.wish)) as pieces:
                async for piece in pieces:
                    is_first = not response.prepared
                    if is_first:
                        await response.prepare(request)
                    await response.write(answering.chunk(piece, is_first=is_first))
        except KVStoreError as error:
            if not response.prepared:
                raise
            failed(error)
            LOG.warning("ended early: %s", error)
            await response.write(event(error_body(error)))
        else:
            if not response.prepared:
                await response.prepare(request)
            await response.write(answering.chunk("", self._finish(passage)))
            if passage.wish.usage_at_end or passage.wish.timings:
                await response.write(answering.usage_chunk(passage))
            await response.write(DONE)
        await response.write_eof()
        return response

    async def _pieces(self, passage: Passage, wish: Wish) -> AsyncGenerator[str, None]:
        """The answer's text as it comes."""
        text = AnswerText(self._served.chat, wish.stop)
        async with aclosing(passage.tokens()) as tokens:
            async for token in tokens:
                if len(passage.answer.tokens) == 1:
                    self._metrics.first_token.observe(passage.passed_s())
                if piece := text.add(token):
                    yield piece
                if text.is_stopped:
                    passage.is_satisfied = True
                    return
        if rest := text.end():
            yield rest

    def _finish(self, passage: Passage) -> str:
        return "stop" if passage.is_satisfied else passage.answer.finish

    def _note(self, passage: Passage, wish: Wish) -> None:
        stages, tokens = passage.stages, len(passage.answer.tokens)
        self._metrics.passed(stages)
        self._metrics.tokens.labels("prompt").inc(len(wish.tokens))
        self._metrics.tokens.labels("answer").inc(tokens)
        LOG.info(
            "%d tokens in, %d out; queue %.3f s, prefill %.3f s, route %.3f s, install %.3f s, "
            "decode %.3f s; %d prefills, %d routes", len(wish.tokens), tokens,
            stages.queue_s, stages.prefill_s, stages.route_s, stages.install_s, stages.decode_s,
            stages.prefills, stages.routes,
        )  # fmt: skip

    def _model(self) -> tuple[str, ChatFormat, int]:
        return self._served.model, self._served.chat, self._served.context_tokens


def _decoded(body: bytes) -> object:
    try:
        found: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadValue("body", body[:40], f"JSON: {error}") from error
    return found


def _refusal(request_id: str, error: KVStoreError) -> web.Response:
    status = status_of(error)
    LOG.info("%d: %s", status, error)
    headers = {REQUEST_ID: request_id}
    if error.retry_after_s:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return _json(error_body(error), status, headers)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers,
        content_type="application/json",
    )  # fmt: skip
