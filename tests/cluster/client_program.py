"""A client in a process of its own, which stops where a test wants it to. Not a test.

`python -m tests.cluster.client_program MASTERS TRANSPORT MODE`: prints a line when it is there,
goes on when it gets one, and prints what came of it.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from kvstore.transfer.choice import BUILT_IN
from kvstore.transfer.transport import IngestSpan, span_checksums
from tests.cluster.pages import Pages

MODEL = "put by a process of its own"


def say(line: str) -> None:
    """Tell the test."""
    print(line, flush=True)


def wait() -> None:
    """Until the test says so."""
    sys.stdin.readline()


def between_plan_and_ingest(transport: str, what: str) -> None:
    """Hang ("hang") or stop the process ("stop") once, when the first piece is hashed."""
    left = [1]

    def checksums(span: IngestSpan, source: memoryview) -> bytes:
        if left[0]:
            left[0] = 0
            say("planned")
            if what == "hang":
                wait()
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        return span_checksums(span, source)

    module = import_module(BUILT_IN[transport])
    assert module.span_checksums is span_checksums, "hashed in another way"
    module.span_checksums = checksums  # type: ignore[attr-defined]  # imported there by name


def main(masters: str, transport: str, mode: str) -> None:
    """Put or view the pages of one chain; `masters` has commas between addresses."""
    with Pages(masters.split(","), transport, MODEL) as pages:
        opened = pages.open()
        chain = opened.chain(range(64))
        if mode == "view":
            pages.store_all(opened, chain)
            with pages.store.views(pages.store.match_prefix(opened, chain)) as views:
                assert all(isinstance(view, memoryview) for view in views)
                say("viewing")
                wait()
            return
        between_plan_and_ingest(transport, mode)
        outcomes = pages.put(opened, chain, timeout_s=60)
        say(" ".join(sorted({type(outcome).__name__ for outcome in outcomes})))


if __name__ == "__main__":
    main(*sys.argv[1:])
