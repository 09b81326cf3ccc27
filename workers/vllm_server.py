"""How an agent asks its vLLM server: tokens in, tokens out, over OpenAI's completions.

Owns aiohttp's client, and which of vLLM's fields are read. What keeps the server from answering is
Unavailable: then another one can be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from kvstore.errors import BadValue, KVStoreError, Unavailable
from workers.serve_messages import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from workers.serve_messages import Sampling

T = TypeVar("T")

OK: Final = 200
REFUSED: Final = 400
CONNECT_S: Final = 3.0
HEALTH_S: Final = 5.0
COMPLETIONS: Final = "/v1/completions"
ENDS: Final = ("stop", "length")
"""Why a request ends by itself; others are vLLM's trouble, or its end."""
SEEDS: Final = 1 << 63
DATA: Final = b"data: "
DONE: Final = b"data: [DONE]"
LINE_BYTES_MAX: Final = 1 << 22


class Served(msgspec.Struct, frozen=True):
    """The model that a server has."""

    id: str
    max_model_len: int


class _Models(msgspec.Struct, frozen=True):
    data: list[Served]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Piece(NamedTuple):
    """Tokens that came at once; `ended` with the last ones."""

    tokens: tuple[int, ...]
    ended: str
    """stop, length, or empty."""


class Prefilled(NamedTuple):
    """What a prompt came to."""

    first: int
    cached_tokens: int
    """Whose KV the server, or the pool, had; 0 where the server does not tell."""
    params: dict[str, Any]
    """For the server that goes on."""


def completion(
    tokens: Sequence[int],
    new_tokens: int,
    how: Sampling,
    end_token: int,
    params: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The question for so many tokens at most, up to the end token.

    Who goes on with a seeded request has drawn nothing yet: its draws begin with another number
    than those of the tokens before.
    """
    asked: dict[str, object] = {
        "prompt": list(tokens),
        "max_tokens": new_tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "seed": (how.seed + len(tokens)) % SEEDS,
        "ignore_eos": True,
        "stop_token_ids": [end_token],
        "return_token_ids": True,
    }
    return asked | ({"kv_transfer_params": dict(params)} if params else {})


class VllmServer:
    """One vLLM server."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Made inside a running loop."""
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LINE_BYTES_MAX,
        )

    async def close(self) -> None:
        """Hang up: vLLM ends what was asked for."""
        await self._session.close()

    async def check(self) -> None:
        """Unavailable where the server does not say that it is well."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_S)
        try:
            async with self._session.get(f"{self._url}/health", timeout=timeout) as response:
                if response.status != OK:
                    raise Unavailable(f"vLLM at {self._url}: status {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"vLLM at {self._url}: {type(error).__name__} {error}") from error

    async def served(self) -> Served:
        """The first model that it has: those behind it are its adapters."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                models = _decoded(await _well(response), _Models)
        except aiohttp.ClientError as error:
            raise Unavailable(f"vLLM at {self._url}: {error}") from error
        if not models.data:
            raise Unavailable(f"vLLM at {self._url} has no model")
        return models.data[0]

    async def prefill(self, asked: Mapping[str, object]) -> Prefilled:
        """Have a prompt computed, and its first token."""
        try:
            async with self._session.post(self._url + COMPLETIONS, json=asked) as response:
                said = _decoded(await _well(response), _Completion)
        except aiohttp.ClientError as error:
            raise Unavailable(f"vLLM at {self._url}: {type(error).__name__} {error}") from error
        if not said.choices:
            raise Unavailable(f"vLLM at {self._url} has answered a prompt with nothing")
        choice = said.choices[0]
        if choice.finish_reason not in ENDS or not choice.token_ids:
            raise Unavailable(f"vLLM ended a prompt by {choice.finish_reason}")
        details = said.usage and said.usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        return Prefilled(choice.token_ids[0], cached, said.kv_transfer_params or {})

    async def generate(self, asked: Mapping[str, object]) -> AsyncGenerator[Piece, None]:
        """The tokens of an answer as they come; who stops iterating ends the request.

        Unavailable where they end before the answer does.
        """
        body = {**asked, "stream": True}
        try:
            async with self._session.post(self._url + COMPLETIONS, json=body) as response:
                if response.status != OK:
                    await _well(response)
                while (line := await response.content.readline()) and line.rstrip() != DONE:
                    if piece := _piece(line):
                        yield piece
                        if piece.ended:
                            return
        except KVStoreError:
            raise
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line without end
            raise Unavailable(f"vLLM at {self._url}: {type(error).__name__} {error}") from error
        raise Unavailable(f"vLLM at {self._url} broke off")


def _piece(line: bytes) -> Piece | None:
    """What a line of the stream brings; None for those in between."""
    if not line.startswith(DATA):
        return None
    said = _decoded(line.removeprefix(DATA), _Completion)
    if not said.choices:
        return None
    choice = said.choices[0]
    if choice.finish_reason not in (None, *ENDS):
        raise Unavailable(f"vLLM ended a request by {choice.finish_reason}")
    return Piece(tuple(choice.token_ids), choice.finish_reason or "")


async def _well(response: aiohttp.ClientResponse) -> bytes:
    """The answer, unless it is a refusal."""
    body = await response.read()
    if response.status == OK:
        return body
    text = body[:200].decode(errors="replace")
    if response.status == REFUSED:
        raise BadValue("request", text, "one that vLLM takes")
    raise Unavailable(f"vLLM: status {response.status}: {text}")


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except BadValue as error:
        raise Unavailable(f"vLLM says what is not understood: {error}") from error
