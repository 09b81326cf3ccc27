"""How a gateway asks inference workers: HTTP with a proof of the cluster secret.

Owns aiohttp's client. Whatever keeps a worker from answering is Unavailable, OutOfSpace or Fenced:
then another one can be asked; CallerErrors are the question's fault. Who is busy is waited for: a
worker is dead when it does not even say that it is there.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp

from kvstore.errors import BadValue, KVStoreError, MalformedMessage, Unavailable, error_from_wire
from workers import tracing
from workers.serve_messages import (
    ABOUT,
    DECODE,
    LINE_BYTES_MAX,
    PREFILL,
    PREPARE,
    About,
    Line,
    PrefillDone,
    Prepared,
    Trouble,
    decode,
    encode,
)
from workers.serve_proof import PROOF_HEADER, SALT_HEADER, prove

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine

    from workers.serve_messages import DecodeAsk, PrefillAsk, PrepareAsk

T = TypeVar("T")

OK: Final = 200
UNPROVED: Final = 401
CONNECT_S: Final = 3.0
SILENCE_S: Final = 15.0
"""Without a byte of an answer, a worker is asked whether it is there; so long may that take."""


class InferenceWorkers:
    """The workers that a gateway talks to, by their addresses."""

    def __init__(self, secret: bytes | None, silence_s: float = SILENCE_S) -> None:
        """Connect to none yet. Made inside a running loop."""
        self._secret = secret
        self._silence_s = silence_s
        self._salts: dict[str, str] = {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        # The master says how many answers run. Behind a bound of ours they would wait, with their
        # places taken.
        everyone = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=everyone, read_bufsize=LINE_BYTES_MAX
        )

    async def close(self) -> None:
        """Hang up."""
        await self._session.close()

    async def about(self, where: str) -> About:
        """What that worker runs."""
        async with self._answer(where, ABOUT, b"") as response:
            return _decoded(await self._heard(where, response.read()), About)

    async def prefill(self, where: str, ask: PrefillAsk) -> PrefillDone:
        """Have a prompt computed and staged."""
        async with self._answer(where, PREFILL, encode(ask)) as response:
            return _decoded(await self._heard(where, response.read()), PrefillDone)

    async def prepare(self, where: str, ask: PrepareAsk) -> None:
        """Have a prompt pulled while it is being computed."""
        async with self._answer(where, PREPARE, encode(ask)) as response:
            _decoded(await response.read(), Prepared)

    async def decode(self, where: str, ask: DecodeAsk) -> AsyncGenerator[Line, None]:
        """The lines of an answer, up to where the worker ends them."""
        async with self._answer(where, DECODE, encode(ask)) as response:
            while line := await self._heard(where, response.content.readline()):
                yield _decoded(line, Line)

    @asynccontextmanager
    async def _answer(
        self, where: str, path: str, body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with await self._heard(where, self._post(where, path, body)) as response:
                if response.status != UNPROVED or self._secret is None:
                    yield await _well(response)
                    return
                # It has a salt that was not known here, or a new one.
                self._salts[where] = response.headers.get(SALT_HEADER, "")
            async with await self._heard(where, self._post(where, path, body)) as response:
                yield await _well(response)
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"worker at {where}: {type(error).__name__} {error}") from error

    async def _heard(self, where: str, answering: Coroutine[Any, Any, T]) -> T:
        """Its result, however late: prompts take what they take. TimeoutError: the worker hangs."""
        waiting = asyncio.ensure_future(answering)
        try:
            while not (await asyncio.wait((waiting,), timeout=self._silence_s))[0]:
                async with asyncio.timeout(self._silence_s):
                    await self.about(where)
            return waiting.result()
        finally:
            waiting.cancel()

    def _post(self, where: str, path: str, body: bytes) -> aiohttp.client._RequestContextManager:
        headers = tracing.headers()
        if self._secret is not None:
            headers[PROOF_HEADER] = prove(self._secret, self._salts.get(where, ""), path, body)
        return self._session.post(f"http://{where}{path}", data=body, headers=headers)


async def _well(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """The answer, unless it is a refusal."""
    if response.status == OK:
        return response
    body = await response.read()
    try:
        trouble = decode(body, Trouble)
    except BadValue:
        raise Unavailable(f"status {response.status}: {body[:80]!r}") from None
    error = error_from_wire(trouble.code, trouble.text)
    raise error if type(error) is not KVStoreError else Unavailable(trouble.text)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except BadValue as error:
        raise MalformedMessage(str(error)) from error
