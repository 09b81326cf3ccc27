"""A process of a peer that answers calls over a pipe, and ends when the pipe does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_TIMEOUT_S: Final = 20.0
CALL_TIMEOUT_S: Final = 120.0
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


class PeerFailed(RuntimeError):
    """The peer answered something that would make its figures worthless."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One such process."""

    def __init__(self, main: object, args: tuple[object, ...], *, pool: bool) -> None:
        """Start `main(pipe, *args)`; `pool`: whether its engine keeps connections."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Read by the engine from the environment when it is loaded.
        os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1" if pool else "0"
        os.environ["MC_LOG_LEVEL"] = "ERROR"
        self._process = context.Process(target=_run_child, args=(main, theirs, args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """For its clock."""
        assert self._process.pid is not None
        return self._process.pid

    def ready(self) -> None:
        """Wait until it says that it is there."""
        self._answer("start", START_TIMEOUT_S)

    def call(self, *request: object) -> object:
        """Its answer; PeerFailed when it fails or keeps silent."""
        self._pipe.send(request)
        return self._answer(request[0], CALL_TIMEOUT_S)

    def _answer(self, what: object, timeout_s: float) -> object:
        if not self._pipe.poll(timeout_s):
            raise PeerFailed(f"{what}: no answer within {timeout_s} s")
        kind, value = self._pipe.recv()
        if kind != "ok":
            raise PeerFailed(str(value))
        return value

    def stop(self) -> None:
        """End it, whatever it does."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run_child(main: object, pipe: Connection, args: tuple[object, ...]) -> None:
    die_with_parent()
    assert callable(main)
    # The engine writes its log there, errors that it recovers from included.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        main(pipe, *args)
    except (EOFError, KeyboardInterrupt):
        pass  # The benchmark has ended.
    except BaseException as error:
        pipe.send(("failed", repr(error)))
    # The engine's threads outlive an orderly exit; nothing here is worth waiting for.
    os._exit(0)
