"""What holds for every test: reproducible examples, the usual signals, and nothing left running.

Owns the hypothesis profiles and the leak check. Must not know any package of ours.
"""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# CI tries the same examples every time; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile("ci")

# Started in the background by a shell without job control we would ignore these, and so would every
# program that a test starts, since ours heed what they inherit (nohup). An interrupt is Python's to
# raise, as it is in the foreground: tests send one to themselves.
for each, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(each) is signal.SIG_IGN:
        signal.signal(each, handler)

# Cluster tests have a harness of their own, which knows the processes that it started.
LEAK_CHECKED = ("unit", "contract", "simulation")
THREAD_END_S = 2.0


def child_pids() -> set[int]:
    """Return the living children of this process, whoever started them (Linux only)."""
    found: set[int] = set()
    for each in Path("/proc/self/task").glob("*/children"):
        # A thread may end before its list is read.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(pid) for pid in each.read_text().split())
    return found


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread or a child process behind.

    What fixtures of a wider scope started before the test is theirs to end.
    """
    kind = request.path.relative_to(Path(__file__).parent).parts[0]
    if kind not in LEAK_CHECKED:
        yield
        return
    threads_before = set(threading.enumerate())
    children_before = child_pids()
    yield
    started = set(threading.enumerate()) - threads_before
    for thread in started:
        thread.join(THREAD_END_S)
    leaked = [repr(thread) for thread in started if thread.is_alive()]
    leaked += [f"child process {pid}" for pid in sorted(child_pids() - children_before)]
    assert not leaked, f"left running: {', '.join(leaked)}"
