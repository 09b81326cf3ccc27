"""Runs a module of ours as a program that never outlives the process that started it.

    python -P -m kvstore.child PARENT_PID MODULE [ARGUMENTS...]

Owns the tie between a program (`kvharbor up`, the demo, a drill) and its parts: the kernel kills
this process when its parent ends, however that happens. Must not know what it runs.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def tied(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program that ends when this process does."""
    return [sys.executable, "-P", "-m", "kvstore.child", str(os.getpid()), module, *arguments]


def main() -> None:
    """Tie this process to its parent, undo the parent's signal mask, become the module."""
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # KILL, not TERM: it must work on a process that hangs, and the pool is made for kill -9.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the tie was made
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
