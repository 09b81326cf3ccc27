"""Pulls into a segment on a disk: brought, encoded, then written as workers.tiers.part_io does.

Record RESERVED, bytes, record SEALED; between any two of these anything may happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.codec import Codec
from kvstore.record import RecordState, pack_record
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from tests.simulation.disk import DiskStore
from tests.simulation.sim_pull import PullRun, pieces, single
from workers.tiers.disk import BLOCK_BYTES
from workers.tiers.guarded_file import OutOfService
from workers.tiers.part_io import Encoded, encoded

if TYPE_CHECKING:
    from tests.simulation.tasks import Steps
    from workers.events import Stretch

CODEC: Final = Codec.LZ4


class DiskPullRun(PullRun):
    """One StartPull in progress, into a segment on a disk."""

    def _pull(self, stretch: Stretch) -> Steps[None]:
        """Bring and write a stretch, page by page."""
        for i in range(stretch.count):
            each = single(stretch, i, self.start.size_class)
            self.outcomes[each.page] = yield from self._store(each)

    def _store(self, each: Stretch) -> Steps[Outcome]:
        brought = bytearray()
        for start, stop in pieces(self.message.part_bytes):
            data = yield from self.piece(each.page, start, stop)
            if self.is_cancelled:
                return Outcome.FENCED
            if data is None:
                return self.failure
            brought += data
            yield self.worker.copy_delay_s()
        if self.is_cancelled:
            return Outcome.FENCED
        if not self.is_right(each.page, memoryview(brought)):
            return self.mismatch(each.page)
        form = encoded(CODEC, memoryview(brought))
        self.stored_max = max(self.stored_max, len(form.stored))
        if len(form.stored) > self.start.size_class:
            return Outcome.TOO_BIG
        try:
            yield from self._write(each, form)
        except OutOfService:
            return Outcome.TRANSPORT
        return Outcome.OK

    def _write(self, each: Stretch, form: Encoded) -> Steps[None]:
        store, checks, size_class = self.memory, self.worker.checks, self.start.size_class
        assert isinstance(store, DiskStore), store
        record = replace(self.record_of(each), stored_bytes=len(form.stored), codec=form.codec)
        store.records.require(each, size_class)
        store.records.write_rows(each, pack_record(record))
        store.damaged.discard(each.offset)
        yield self.worker.copy_delay_s()
        stored = bytes(form.stored).ljust(size_class_of(len(form.stored)), b"\0")
        for at in range(0, len(stored), BLOCK_BYTES):
            checks.overwrites(self.worker, store, each.offset, size_class)
            store.write_block(each.offset + at, stored[at : at + BLOCK_BYTES])
            yield self.worker.copy_delay_s()
        store.records.write_rows(each, pack_record(replace(record, state=RecordState.SEALED)))
        checks.sealed(store, store.record(each.offset, size_class))
