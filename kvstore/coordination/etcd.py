"""The MetadataStore in etcd: many masters, of whom one leads while its lease lasts.

Owns the keys `config`, `epoch` and `leader` under /kvharbor/<cluster>/ and the condition that every
write is under. `leader` is bound to a lease of etcd's; its create revision names the term. Each
write puts `leader` again, and is conditional on the revision at which the one before did: so no
other term lies between, and a write whose answer was lost, and which may lie in the buffers of a
stopped member, cannot take effect after a later one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
from aetcd import rpc

from kvstore import limits
from kvstore.coordination.etcd_calls import Compacted, EtcdCalls, LeaseGone
from kvstore.coordination.etcd_keys import EtcdKeys, found_by
from kvstore.coordination.metadata_store import (
    EPOCH_MAX,
    RESERVED_KEYS,
    Leader,
    Term,
    require_writable,
)
from kvstore.errors import (
    AccessDenied,
    ConfigError,
    KVStoreError,
    OutOfSpace,
    StaleEpoch,
    Unavailable,
)
from kvstore.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from kvstore.coordination.etcd_calls import KeyValue
    from kvstore.coordination.etcd_config import EtcdConfig
    from kvstore.coordination.metadata_store import Candidate, Entry

LAYOUT: Final = 1
"""Of all keys and values of a cluster. Raised when masters of before would misread them."""
ELECTION_TIMEOUT_S: Final = limits.LEADER_LEASE_S / 4
"""For each call that a term hangs on."""
PAGE_KEYS_FIRST: Final = 16
PAGE_KEYS_MAX: Final = 512
PAGE_BYTES: Final = 2 << 20
"""What a page of a load shall have; how many keys that is, the page before it tells."""
COMPACT_EVERY_S: Final = 300.0

_FINGERPRINT: Final = b"kvharbor: the metadata of one cluster is under one secret"
_LOG = logging.getLogger(__name__)


class _Config(msgspec.Struct, frozen=True):
    """What `config` holds: who may use what is beside it."""

    layout: int
    secret: str
    """A fingerprint of the cluster secret; empty without one."""


class _OwnTerm(msgspec.Struct, eq=False):
    """A term that this master won."""

    epoch: Epoch
    lease: int
    created: int
    """Create revision of `leader`: another one is another term."""
    written: int
    """Revision of the last write that is known to be in."""
    over: str = ""
    """Why it ended."""


class EtcdStore:
    """The metadata of one cluster, for one master."""

    def __init__(
        self,
        config: EtcdConfig,
        cluster: str,
        secret: bytes | None = None,
        families: tuple[str, ...] = ("",),
    ) -> None:
        """Name the place; nothing is dialled. `families` are the beginnings of all keys of ours."""
        self._calls = EtcdCalls(config)
        self._cluster = cluster
        self._keys = EtcdKeys(cluster)
        proof = b"" if secret is None else hmac.digest(secret, _FINGERPRINT, "sha256")
        self._config = _Config(LAYOUT, proof.hex())
        self._families = families
        self._is_owned = config.owned
        self._term: _OwnTerm | None = None
        self._writing = asyncio.Lock()
        self._upkeep: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """As the port says; whoever comes first says what `config` holds."""
        self._calls.read_files()
        while True:
            config, epoch = found_by(await self._calls.look(self._keys.get_all("config", "epoch")))
            if config is not None:
                break
            puts = [self._keys.put("config", msgspec.json.encode(self._config))]
            if epoch is None:
                puts.append(self._keys.put("epoch", b"0"))
            request = rpc.TxnRequest(compare=[self._keys.is_absent("config")], success=puts)
            with _nobody_begins_where_it_is_full():
                await self._calls.transact(request)
        self._check(config)
        self._next_epoch(epoch)

    async def campaign(self, candidate: Candidate) -> Term | Leader:
        """As the port says. An election that somebody else's interferes with is Unavailable."""
        self._end_term()
        with _nobody_can_tell(), _nobody_begins_where_it_is_full():
            leader, epoch, config = await self._look("leader", "epoch", "config")
            if leader is not None:
                return self._leader(leader)
            self._check(config)  # a newer master may have led meanwhile
            return await self._stand(candidate, epoch)

    async def renew(self) -> None:
        """As the port says: the lease must live, and `leader` still be ours."""
        term = self._require_term()
        if self._upkeep is not None and self._upkeep.done():
            self._upkeep.result()  # raises the bug that has ended it: the history would only grow
        with _nobody_can_tell():
            try:
                await self._calls.keep_alive(term.lease, ELECTION_TIMEOUT_S)
            except LeaseGone as error:
                raise self._over(term, "its lease has ended") from error
            (leader,) = await self._look("leader")
        self._require_ours(term, leader)

    async def load(self, prefix: str) -> AsyncIterator[list[Entry]]:
        """As the port says; Unavailable, too, when the moment was compacted away meanwhile."""
        start, end = self._keys.prefix(prefix)
        request = rpc.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS_FIRST)
        foreign: list[bytes] = []
        more = True
        while more:
            try:
                with _nobody_can_tell():
                    answer = await self._calls.range(request)
            except Compacted as error:
                raise Unavailable("etcd was compacted during a load: start over") from error
            if page := self._sorted_out(answer.kvs, foreign):
                yield page
            more = answer.more
            if more:
                request.key = answer.kvs[-1].key + b"\0"
                request.revision = request.revision or answer.header.revision
                request.limit = _keys_of_a_page(answer.kvs)
        if foreign:
            first = foreign[0].decode(errors="backslashreplace")
            _LOG.warning("etcd: %d keys are not ours and left alone, e.g. %s", len(foreign), first)

    async def write(self, puts: Sequence[Entry], deletes: Sequence[str]) -> None:
        """As the port says. One goes on at a time: each names the revision of the one before."""
        require_writable(puts, deletes)
        put = {key for key, _ in puts}
        # etcd takes no key twice. A put replaces what a delete would have removed.
        changes = [self._keys.delete(key) for key in dict.fromkeys(deletes) if key not in put]
        changes += [self._keys.put(key, value) for key, value in puts]
        changes.append(self._keys.touch("leader"))
        async with self._writing:
            term = self._require_term()
            with _nobody_can_tell():
                while not await self._write(term, changes):
                    pass

    async def resign(self) -> None:
        """As the port says."""
        term = self._end_term()
        if term is not None and not term.over:
            term.over = "it resigned"
            with suppress(KVStoreError, LeaseGone):
                await self._calls.revoke(term.lease, ELECTION_TIMEOUT_S)

    async def close(self) -> None:
        """As the port says."""
        self._end_term()
        await self._calls.close()

    async def _stand(self, candidate: Candidate, before: KeyValue | None) -> Term | Leader:
        """Try to make `leader` ours, and raise the epoch with it (I10)."""
        epoch = max(self._next_epoch(before), Epoch(candidate.above + 1))
        assert before is not None, "else there is no next epoch"
        granted = await self._calls.grant(round(limits.LEADER_LEASE_S), ELECTION_TIMEOUT_S)
        value = msgspec.json.encode(Leader(epoch, candidate.name, candidate.where))
        request = rpc.TxnRequest(
            compare=[
                self._keys.is_absent("leader"),
                self._keys.is_written_at("epoch", before.mod_revision),
            ],
            success=[
                self._keys.put("epoch", str(epoch).encode()),
                self._keys.put("leader", value, lease=granted.ID),
            ],
            failure=[self._keys.get("leader")],
        )
        try:
            answer = await self._calls.transact(request, ELECTION_TIMEOUT_S)
        except KVStoreError:
            await self._drop(granted.ID)  # it may have been won: nobody would know
            raise
        if not answer.succeeded:
            await self._drop(granted.ID)
            (leader,) = found_by(answer)
            if leader is None:
                raise Unavailable("another election was under way")
            return self._leader(leader)
        revision = answer.header.revision
        self._term = _OwnTerm(epoch, granted.ID, created=revision, written=revision)
        if self._is_owned:
            self._upkeep = asyncio.create_task(self._forget_history())
        # Where its elections are slow etcd grants more than was asked for. That is not counted on:
        # the next leader waits for readers' leases as if this one had gone on for no longer (I9).
        return Term(epoch, min(float(granted.TTL), limits.LEADER_LEASE_S))

    async def _drop(self, lease: int) -> None:
        with suppress(KVStoreError, LeaseGone):
            await self._calls.revoke(lease, ELECTION_TIMEOUT_S)

    async def _write(self, term: _OwnTerm, changes: list[object]) -> bool:
        """Whether they are in; else an earlier write turned out to be, and this one may follow."""
        request = rpc.TxnRequest(
            # I10: no other term has written it
            compare=[self._keys.is_written_at("leader", term.written)],
            success=changes,
            failure=[self._keys.get("leader")],
        )
        answer = await self._calls.transact(request)
        if answer.succeeded:
            term.written = answer.header.revision
            return True
        (leader,) = found_by(answer)
        term.written = self._require_ours(term, leader).mod_revision
        return False

    async def _forget_history(self) -> None:
        """Compact, every now and then, what is older than that. Never ends by itself."""
        revision = 0
        while True:
            await asyncio.sleep(COMPACT_EVERY_S)
            try:
                if revision:
                    with suppress(Compacted):
                        await self._calls.compact(revision)
                answer = await self._calls.range(rpc.RangeRequest(key=self._keys.name("leader")))
                revision = answer.header.revision
            except KVStoreError as error:
                _LOG.warning("the history in etcd is not compacted for now: %s", error)

    def _require_term(self) -> _OwnTerm:
        term = self._term
        if term is None:
            raise StaleEpoch("this master is in no term")
        if term.over:
            raise StaleEpoch(f"epoch {term.epoch} is over: {term.over}")
        return term

    def _require_ours(self, term: _OwnTerm, leader: KeyValue | None) -> KeyValue:
        if leader is None:
            raise self._over(term, "nobody leads")
        if leader.create_revision != term.created:
            name = "somebody"
            with suppress(ConfigError):
                name = self._leader(leader).name
            raise self._over(term, f"{name} leads")
        return leader

    def _over(self, term: _OwnTerm, why: str) -> StaleEpoch:
        """End it for good."""
        term.over = why
        if self._term is term and self._upkeep is not None:
            self._upkeep.cancel()
        return StaleEpoch(f"epoch {term.epoch} is over: {why}")

    def _end_term(self) -> _OwnTerm | None:
        term, self._term = self._term, None
        if self._upkeep is not None:
            self._upkeep.cancel()
            self._upkeep = None
        return term

    def _check(self, config: KeyValue | None) -> None:
        """Whether what lies here is ours to use; ConfigError says what to do otherwise."""
        where = self._keys.name("config").decode()
        if config is None:
            raise ConfigError(f"etcd: {where} is gone; a master that is started writes it anew")
        try:
            found = msgspec.json.decode(config.value, type=_Config)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"etcd: {where} is not kvharbor's: {error}") from error
        if found.layout != LAYOUT:
            raise ConfigError(
                f"etcd: {where} says layout {found.layout}, this master knows {LAYOUT}: "
                "use a version that knows it"
            )
        if not hmac.compare_digest(found.secret, self._config.secret):
            raise ConfigError(
                f"etcd: {where} was written under another secret: either two clusters are called "
                f"{self._cluster!r}, and one needs another name, or the secret was changed: then "
                "stop all masters and delete this key"
            )

    def _next_epoch(self, found: KeyValue | None) -> Epoch:
        """The one after what `epoch` holds; it is never begun anew, whatever happened to it."""
        text = None if found is None else found.value
        if text is None or not text.isdigit() or int(text) >= EPOCH_MAX:
            raise ConfigError(
                f"etcd: {self._keys.name('epoch').decode()} holds {text!r}, want a number below "
                f"{EPOCH_MAX}: write one there that is higher than all epochs of this cluster"
            )
        return Epoch(int(text) + 1)

    def _leader(self, found: KeyValue) -> Leader:
        where = self._keys.name("leader").decode()
        if not found.lease:
            raise ConfigError(f"etcd: {where} has no lease, so it never ends: delete it")
        try:
            return msgspec.json.decode(found.value, type=Leader)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"etcd: {where} is not kvharbor's: {error}") from error

    def _sorted_out(self, found: Sequence[KeyValue], foreign: list[bytes]) -> list[Entry]:
        """What of it the master wrote; the names of the rest go to `foreign`."""
        page: list[Entry] = []
        for each in found:
            try:
                key = each.key.removeprefix(self._keys.root).decode()
            except UnicodeDecodeError:
                foreign.append(each.key)
                continue
            if key in RESERVED_KEYS:
                continue
            if key.startswith(self._families):
                page.append((key, each.value))
            else:
                foreign.append(each.key)
        return page

    async def _look(self, *names: str) -> list[KeyValue | None]:
        """Each key with its value and revisions, None where it is absent, all of one moment.

        From one endpoint: who holds or seeks a term tries again by itself, soon and elsewhere.
        """
        return found_by(await self._calls.transact(self._keys.get_all(*names), ELECTION_TIMEOUT_S))


def _keys_of_a_page(page: Sequence[KeyValue]) -> int:
    size = sum(len(each.value) for each in page)
    return max(1, min(PAGE_KEYS_MAX, PAGE_BYTES * len(page) // max(size, 1)))


@contextmanager
def _nobody_begins_where_it_is_full() -> Iterator[None]:
    """Without space etcd grants no lease and takes no key: until it is made, nobody can lead."""
    try:
        yield
    except OutOfSpace as error:
        raise Unavailable(str(error)) from error


@contextmanager
def _nobody_can_tell() -> Iterator[None]:
    """Once a store is open, a refusal is a disturbance: the master goes on and says so."""
    try:
        yield
    except (AccessDenied, ConfigError) as error:
        raise Unavailable(str(error)) from error
    except LeaseGone as error:
        raise Unavailable("a lease of etcd's ended before it was used") from error
