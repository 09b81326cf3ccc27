"""Programs that need torch, forked from a process that has loaded it and done nothing with it.

    python -m tests.cluster.forked DESCRIPTOR MODULE...

Loading takes five seconds of a processor, for each of the two dozen inference workers of a test.
Whether a program starts on its own is for those tests to say that start it as its users do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.cluster.servers import die_with_parent
from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from typing import BinaryIO

ROOT: Final = Path(__file__).resolve().parent.parent.parent
LOADED: Final = ("workers.serve", "workers.tiny_llama", "transformers.models.llama")
ORDER_BYTES_MAX: Final = 1 << 17


@cache
def mother() -> Mother:
    """The one of this process; it ends with it."""
    made = Mother(*LOADED)
    atexit.register(made.close)
    return made


class Mother:
    """Starts programs whose modules it has loaded."""

    def __init__(self, *modules: str) -> None:
        """Start a process that loads these modules."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *modules],
                env=clean_environment() | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent,
            )

    def start(self, module: str, arguments: list[str], log: BinaryIO) -> Forked:
        """Run the `main` of a module in this process's environment as it is now."""
        order = {"module": module, "arguments": arguments, "environment": clean_environment()}
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], [log.fileno()])
            said, descriptors, _, _ = socket.recv_fds(self._control, ORDER_BYTES_MAX, 1)
        assert descriptors, "the process that forks has ended: its words are above"
        return Forked(self, json.loads(said), descriptors[0])

    def reap(self, pid: int) -> int:
        """The exit code of a program that has ended, negative for a signal; asked for once."""
        with self._lock:
            self._control.send(json.dumps({"reap": pid}).encode())
            return int(json.loads(self._control.recv(ORDER_BYTES_MAX)))

    def close(self) -> None:
        """End it, and what it has started with it."""
        self._control.close()
        self._process.wait()


class Forked:
    """A program that was started so, with as much of Popen as is needed."""

    def __init__(self, mother: Mother, pid: int, descriptor: int) -> None:
        """`descriptor` stands for the process, whoever has its number later."""
        self.pid = pid
        self._mother = mother
        self._descriptor = descriptor
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if self._code is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._code = self._mother.reap(self.pid)
            os.close(self._descriptor)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Send it SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)


def main() -> None:
    """Load the modules, then fork as told; a program that was forked comes out of here."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what was loaded stays in memory that is shared
    order = fork_as_told(control)
    if order is not None:
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv[:] = [order["module"], *order["arguments"]]
        importlib.import_module(order["module"]).main()


def fork_as_told(control: socket.socket) -> dict[str, Any] | None:
    """In a program that was forked, what it is to be; None when nobody tells anything any more."""
    while True:
        said, files, _, _ = socket.recv_fds(control, ORDER_BYTES_MAX, 1)
        if not said:
            return None
        order: dict[str, Any] = json.loads(said)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            control.close()
            die_with_parent()
            for stream in (1, 2):
                os.dup2(files[0], stream)
            os.close(files[0])
            return order
        os.close(files[0])
        descriptor = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps(pid).encode()], [descriptor])
        os.close(descriptor)


if __name__ == "__main__":
    main()
