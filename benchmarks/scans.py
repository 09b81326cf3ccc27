"""What does looking through all pages of a large pool cost its master?

A core, without process or network, takes over a pool of which two hosts have every page, beside a
third one. Then it is asked for its status, replicas are counted, and one of the two hosts is lost:
its copies leave the directory, and what lacks replicas is noted. Times are the processor's.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Report, arguments
from benchmarks.stored_pool import Heir, stored_pool
from kvstore.wire.messages.membership import Heartbeat
from kvstore.wire.messages.reads import GetStatus
from kvstore.wire.messages.replicas import GetReplicas, ReplicaReport
from master.events import Request, SessionClosed, SessionId, SessionOpened, Tick
from master.tunables import Tunables

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Figure

PAGES: Final = (100_000, 1_000_000)
BEAT_S: Final = 0.5
EVENT_TARGET_MS: Final = 5.0
OPERATOR: Final = SessionId(9)
HOSTS: Final = {"w1": SessionId(1), "w2": SessionId(2), "w3": SessionId(3)}
LOST: Final = "w2"
EMPTY: Final = "w3"


class Pool:
    """A core with that pool."""

    def __init__(self, pages: int) -> None:
        """Of so many pages, all taken over."""
        stored = stored_pool(pages, tuple(each for each in HOSTS if each != EMPTY))
        self.heir = Heir(stored, Tunables(replicas=2))
        stored.digests[EMPTY] = {f"{EMPTY}-0": ()}
        for worker, session in HOSTS.items():
            self.heir.meet(stored, worker, session)
        self.heir.feed(SessionOpened(OPERATOR, "operator", "", "o", b"o"))
        self._alive = dict(HOSTS)
        self._beats = 0

    def lose(self) -> None:
        """One of the hosts is gone."""
        self.heir.feed(SessionClosed(self._alive.pop(LOST)))

    def counted(self) -> ReplicaReport:
        """What an operator is told."""
        report = self.heir.ask(GetReplicas(), OPERATOR)
        assert isinstance(report, ReplicaReport), report
        return report

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let time pass; workers beat."""
        heir = self.heir
        while not is_over():
            if heir.now >= self._beats * BEAT_S:
                self._beats = int(heir.now / BEAT_S) + 1
                for name, session in self._alive.items():
                    heir.feed(Request(session, 1 << 20, Heartbeat(name, 2, 0)))
            heir.feed(Tick())
            heir.now = max(heir.now, min(heir.master.wakeup_s, self._beats * BEAT_S))


def _measure(report: Report, pages: int) -> list[dict[str, Figure]]:
    pool = Pool(pages)
    heir, core = pool.heir, pool.heir.master.core
    rows: list[dict[str, Figure]] = []

    def done(what: str, looked: int) -> None:
        rows.append(
            {
                "what": what,
                "pages": looked,
                "s": heir.spent_s,
                "us/page": 1e6 * heir.spent_s / looked,
                "longest event ms": 1e3 * heir.longest_event_s,
            }
        )
        report.at_most(f"{what}/{pages}/longest_event_ms", 1e3 * heir.longest_event_s,
                       EVENT_TARGET_MS)  # fmt: skip

    heir.begin()
    heir.ask(GetStatus(), OPERATOR)
    done("status", heir.pages)
    heir.begin()
    counted = pool.counted()
    assert counted.namespaces[0].pages == heir.pages, counted
    done("counted", heir.pages)
    pool.lose()
    heir.begin()
    pool.run_until(lambda: core.counters["pages_lost"] == heir.pages)
    done("a host's copies dropped", heir.pages)
    scans = core.counters["replica_scans"]
    heir.begin()
    pool.run_until(lambda: core.counters["replica_scans"] > scans)
    done("looked through for repair", heir.pages)
    assert core.counters["repairs_put_off"] or len(core.replication.queue), "nothing was noted"
    return rows


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "", lambda _: None)
    report = Report("Looking through all pages of a pool", options)
    gc.freeze()  # as a master does
    sizes = PAGES[:1] if options.quick else PAGES
    rows = [row for pages in sizes for row in _measure(report, pages)]
    report.table("Of a pool of three hosts, two replicas of each page", rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
