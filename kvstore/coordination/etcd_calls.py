"""Calls to etcd: one endpoint at a time, each call with a deadline, each failure one of our errors.

Owns connections, tokens and the meaning of etcd's errors. A connection whose call failed for want
of an answer is given up and the next endpoint is taken: gRPC would wait before it dials again, and
on a half-open one it would wait for ever. Must not know keys, terms or what a transaction is for.
Needs the extra `etcd`, which is loaded only where a master is configured for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import grpc
from aetcd import rpc

from kvstore.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    OutOfSpace,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvstore.coordination.etcd_config import EtcdConfig, TlsFiles

Answer = TypeVar("Answer")


class Header(Protocol):
    """Comes with every answer."""

    revision: int


class KeyValue(Protocol):
    """A key as it is now."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class RangeAnswer(Protocol):
    """A page of keys; `more` follow."""

    header: Header
    kvs: Sequence[KeyValue]
    more: bool


class OneRange(Protocol):
    """What a read inside a transaction found."""

    response_range: RangeAnswer


class TransactionAnswer(Protocol):
    """Of the success branch where `succeeded`, else of the other one."""

    header: Header
    succeeded: bool
    responses: Sequence[OneRange]


class GrantAnswer(Protocol):
    """A lease, and its seconds: they may be more than what was asked for."""

    ID: int
    TTL: int


class KeepAliveAnswer(Protocol):
    """Seconds that are left; 0 when it has ended."""

    TTL: int


NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)
"""After these another endpoint may know more."""

_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a new connection is new, back-off included
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),  # a page of values is as large as its values are
)
_MUST_HAVE_LEADER: Final = ("hasleader", "true")
"""A member that is cut off from the others says so at once instead of waiting for them."""
_TOKEN_REFUSED: Final = ("invalid auth token", "revision of auth store is old")
_ACCESS_REFUSED: Final = (
    "authentication failed",
    "authentication is not enabled",
    "permission denied",
    "user name is empty",
    *_TOKEN_REFUSED,
)
_TLS_REFUSED: Final = ("CERTIFICATE_VERIFY_FAILED", "(TSI_")
"""The second is how gRPC says that the peer ended a connection over its certificate."""


class LeaseGone(Exception):
    """etcd knows that this lease has ended: not the same as not knowing."""


class Compacted(Exception):
    """The revision asked for was forgotten."""


class _Line:
    """One connection to one endpoint, closed by its last user once it was given up."""

    def __init__(self, target: str, tls: TlsFiles | None) -> None:
        self.target = target
        if tls is None:
            self.channel = rpc.insecure_channel(target, options=_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
            self.channel = rpc.secure_channel(target, credentials, options=_OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)
        self.token: str | None = None
        self.users = 0
        self.is_given_up = False


class EtcdCalls:
    """All calls of one master."""

    def __init__(self, config: EtcdConfig) -> None:
        """Dial nothing yet."""
        self._config = config
        self._turn = 0
        self._line: _Line | None = None
        self._lines: set[_Line] = set()
        self._tls: TlsFiles | None = None
        self._password = ""

    def read_files(self) -> None:
        """Read what proves who we are; ConfigError names the file that cannot be used."""
        self._tls = self._config.tls()
        if self._config.user is not None:
            self._password = self._config.password()

    async def close(self) -> None:
        """Close every connection; calls that go on end with Unavailable. Safe to repeat."""
        lines, self._lines, self._line = self._lines, set(), None
        for line in lines:
            await line.channel.close()

    async def range(self, request: object) -> RangeAnswer:
        """Read a range, from whichever endpoint answers."""
        return await self._ask_around(lambda line: line.kv.Range, request)

    async def look(self, request: object) -> TransactionAnswer:
        """Do a transaction that changes nothing, where whichever endpoint answers."""
        return await self._ask_around(lambda line: line.kv.Txn, request)

    async def transact(self, request: object, timeout_s: float | None = None) -> TransactionAnswer:
        """Do what the request says, or what it says for the other case, all or nothing."""
        return await self._ask(lambda line: line.kv.Txn, request, timeout_s)

    async def grant(self, lease_s: int, timeout_s: float) -> GrantAnswer:
        """Begin a lease."""
        request = rpc.LeaseGrantRequest(TTL=lease_s)
        return await self._ask(lambda line: line.leases.LeaseGrant, request, timeout_s)

    async def keep_alive(self, lease: int, timeout_s: float) -> None:
        """Let a lease start anew. LeaseGone when it has ended."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)
        answer = await self._ask(_keep_alive, request, timeout_s)
        if answer.TTL <= 0:
            raise LeaseGone

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease, and with it its keys. LeaseGone when it has ended."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._ask(lambda line: line.leases.LeaseRevoke, request, timeout_s)

    async def compact(self, revision: int) -> None:
        """Forget what was before this revision. Compacted when that is done already."""
        request = rpc.CompactionRequest(revision=revision)
        await self._ask(lambda line: line.kv.Compact, request)

    async def _ask_around(
        self, pick: Callable[[_Line], Callable[..., Awaitable[Answer]]], request: object
    ) -> Answer:
        """Ask one endpoint after another."""
        for _ in self._config.endpoints[1:]:
            with contextlib.suppress(Unavailable):
                return await self._ask(pick, request)
        return await self._ask(pick, request)

    async def _ask(
        self,
        pick: Callable[[_Line], Callable[..., Awaitable[Answer]]],
        request: object,
        timeout_s: float | None = None,
    ) -> Answer:
        """One exchange on the line of the moment; a second one where the token was too old."""
        async with contextlib.AsyncExitStack() as undo:
            line = self._take_line()
            undo.push_async_callback(self._leave, line)
            try:
                async with asyncio.timeout(timeout_s or self._config.timeout_s) as whole:
                    try:
                        return await self._exchange(line, pick, request, whole)
                    except rpc.AioRpcError as error:
                        if line.token is None or not _has(error, _TOKEN_REFUSED):
                            raise
                    line.token = None
                    return await self._exchange(line, pick, request, whole)
            except rpc.AioRpcError as error:
                if error.code() in NO_ANSWER:
                    self._give_up(line)
                raise _typed(error, line.target) from error
            except TimeoutError as error:
                self._give_up(line)
                raise DeadlineExceeded(f"etcd at {line.target} did not answer in time") from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if line in self._lines or (task is not None and task.cancelling()):
                    raise
                raise Unavailable("the metadata store was closed meanwhile") from None

    async def _exchange(
        self,
        line: _Line,
        pick: Callable[[_Line], Callable[..., Awaitable[Answer]]],
        request: object,
        whole: asyncio.Timeout,
    ) -> Answer:
        """Log in where that is needed, then ask; gRPC hears of the deadline so that etcd does."""
        ends_s = whole.when()
        assert ends_s is not None
        loop = asyncio.get_running_loop()
        if self._config.user is not None and line.token is None:
            who = rpc.AuthenticateRequest(name=self._config.user, password=self._password)
            answer = await line.auth.Authenticate(who, timeout=ends_s - loop.time())
            line.token = answer.token
        token = () if line.token is None else (("token", line.token),)
        return await pick(line)(
            request, timeout=ends_s - loop.time(), metadata=(_MUST_HAVE_LEADER, *token)
        )

    def _take_line(self) -> _Line:
        if self._line is None:
            target = str(self._config.endpoints[self._turn % len(self._config.endpoints)])
            self._line = _Line(target, self._tls)
            self._lines.add(self._line)
        self._line.users += 1
        return self._line

    def _give_up(self, line: _Line) -> None:
        """Turn to the next endpoint, unless another call's failure has done so."""
        line.is_given_up = True
        if self._line is line:
            self._line = None
            self._turn += 1

    async def _leave(self, line: _Line) -> None:
        line.users -= 1
        if line.is_given_up and line.users == 0 and line in self._lines:
            self._lines.discard(line)
            await line.channel.close()


def _keep_alive(line: _Line) -> Callable[..., Awaitable[KeepAliveAnswer]]:
    """etcd offers it as a stream only; one of one request."""

    async def exchange(
        request: object, timeout: float, metadata: tuple[tuple[str, str], ...]
    ) -> KeepAliveAnswer:
        stream = line.leases.LeaseKeepAlive([request], timeout=timeout, metadata=metadata)
        answers: list[KeepAliveAnswer] = [answer async for answer in stream]
        if not answers:
            raise Unavailable(f"etcd at {line.target} ended a renewal without an answer")
        return answers[0]

    return exchange


def _has(error: rpc.AioRpcError, texts: tuple[str, ...]) -> bool:
    details = str(error.details())
    return any(text in details for text in texts)


def _typed(error: rpc.AioRpcError, target: str) -> KVStoreError | LeaseGone | Compacted:
    text = f"etcd at {target}: {error.details()}"
    if _has(error, ("permission denied",)):
        return AccessDenied(f"{text} (want readwrite on the prefix of [cluster] name)")
    if _has(error, _ACCESS_REFUSED):
        return AccessDenied(text)
    if _has(error, _TLS_REFUSED):
        return ConfigError(f"{text} (ca_file, cert_file and key_file decide)")
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _has(error, ("space exceeded",)):
            return OutOfSpace(text)
        case grpc.StatusCode.NOT_FOUND if _has(error, ("lease not found",)):
            return LeaseGone(text)
        case grpc.StatusCode.OUT_OF_RANGE if _has(error, ("compacted",)):
            return Compacted(text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"{text}: this is no etcd of version 3")
        case _:
            return Unavailable(text)
