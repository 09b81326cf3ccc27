"""The program that holds a transfer engine ends by its bugs, whatever threads the engine has."""

from __future__ import annotations

import socket
import subprocess
import sys

from kvstore.exit_codes import ExitCode
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.engine import EngineUnmap

BUGGY = """
import threading
from kvstore.transfer import mooncake_child

def fail(*_):
    raise IndexError("a bug that nobody knows of")

threading.Thread(target=threading.Event().wait).start()  # as an engine's, which never end
mooncake_child.Child._answer = fail
mooncake_child.main()
"""


def test_a_bug_ends_the_program_although_threads_go_on() -> None:
    """Or its parent would wait for every answer until the deadline, and take it for alive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", BUGGY, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            FrameSocket(ours).send(FrameKind.REQUEST, 1, EngineUnmap(1))
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == ExitCode.INTERNAL
    assert "IndexError: a bug that nobody knows of" in said
