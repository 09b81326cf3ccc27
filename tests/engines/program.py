"""A program in a process of its own, which is told what to do line by line, and ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

ROOT: Final = Path(__file__).resolve().parent.parent.parent
START_S: Final = 600.0
"""An engine imports for a quarter of a minute, alone on a machine."""
ANSWER_S: Final = 240.0
"""Of anything that a program is told; a hang fails the test."""
END_S: Final = 60.0
LOG_SHOWN: Final = 6000


class Program:
    """`python -m MODULE DESCRIPTOR OPTIONS`, answering on DESCRIPTOR; a context manager."""

    def __init__(
        self,
        module: str,
        options: Mapping[str, object],
        environment: Mapping[str, str],
        *,
        folder: Path,
    ) -> None:
        """Remember how to start it; its own words go to a file in `folder`."""
        self._log = folder / f"{module}-{time.monotonic_ns()}.log"
        self._module = module
        self._options = options
        self._environment = clean_environment() | {"PYTHONPATH": str(ROOT), **environment}

    def __enter__(self) -> Self:
        """Start it and wait until it serves."""
        reading, writing = os.pipe()
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", self._module),
                    *(str(writing), json.dumps(self._options)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
                env=self._environment,
            )
        os.close(writing)
        self._replies = os.fdopen(reading)
        try:
            assert self.reply(START_S) == {"ready": True}
        except BaseException:
            self.__exit__(AssertionError)
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        """End it, and show its log where the test has failed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._replies.close()
        if kind is not None:
            print(f"---- {self._log}\n{self.log()[-LOG_SHOWN:]}")

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def tell(self, **command: object) -> None:
        """Have it do something; `reply` has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def reply(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        """Its next answer."""
        said, _, _ = select.select([self._replies], [], [], within_s)
        line = self._replies.readline() if said else ""
        assert line, f"the program has ended or hangs: {self.log()[-LOG_SHOWN:]}"
        reply: dict[str, Any] = json.loads(line)
        return reply
