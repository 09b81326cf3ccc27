"""A vLLM engine of the engines' environment, started from ours and told what to serve.

Nothing of vLLM is imported here: the child is `peers.vllm_child`, run by the other environment's
Python.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.harness import ROOT, ProcessClock
from benchmarks.peers.child import PeerFailed, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

PYTHON: Final = ROOT / ".venv-engines" / "bin" / "python"
ANSWER_S: Final = 600.0
END_S: Final = 60.0
RANK: Final = "VLLM::Worker"
LOG_SHOWN: Final = 3000
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # vLLM keeps another core free for a connector, and where there are two it keeps none.
    "VLLM_CPU_OMP_THREADS_BIND": "1",
}


class Served(NamedTuple):
    """What became of requests that were given at once."""

    first_s: list[float]
    """Until each one's first token."""
    each_s: list[float]
    """Of each of the tokens after it, for each request; 0 where there is one token."""
    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens that were not computed."""
    total_s: float
    """Until the last token of all."""


class VllmEngine(AbstractContextManager["VllmEngine"]):
    """One engine; leaving the context ends it."""

    def __init__(
        self,
        options: Mapping[str, object],
        folder: Path,
        program: str = "benchmarks.peers.vllm_child",
    ) -> None:
        """Start it, its log in `folder`; `ready` waits until it serves."""
        reading, writing = os.pipe()
        self._log = folder / f"vllm-{writing}-{len(list(folder.iterdir()))}.log"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVHARBOR")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(str(PYTHON), "-P", "-m", program),
                    *(str(writing), json.dumps(dict(options))),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
                env={**kept, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                preexec_fn=die_with_parent,
            )
        os.close(writing)
        self._replies = os.fdopen(reading)

    def ready(self) -> None:
        """PeerFailed where it does not come up."""
        self._reply()

    def serve(self, prompts: Sequence[Sequence[int]], tokens: int) -> Served:
        """Give it these prompts at once, and wait for so many tokens of each."""
        said = self._tell(do="serve", prompts=prompts, tokens=tokens)
        came = said["came_s"]
        return Served(
            [each[0] for each in came],
            [(each[-1] - each[0]) / max(1, len(each) - 1) for each in came],
            said["tokens"],
            said["cached"],
            max(each[-1] for each in came),
        )

    def clock(self) -> ProcessClock:
        """Processor time of the rank: the process that computes, saves and loads."""
        ranks = [
            pid for pid in _descendants(self._process.pid)
            if Path(f"/proc/{pid}/comm").read_text().startswith(RANK)
        ]  # fmt: skip
        if len(ranks) != 1:
            raise PeerFailed(f"an engine has processes {ranks} named {RANK}")
        return ProcessClock(ranks)

    def forget(self) -> None:
        """Have it drop its own prefix cache."""
        self._tell(do="forget")

    def _tell(self, **command: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        said, _, _ = select.select([self._replies], [], [], ANSWER_S)
        line = self._replies.readline() if said else ""
        if not line:
            log = self._log.read_text(errors="replace")[-LOG_SHOWN:]
            raise PeerFailed(f"the engine has ended or hangs: {log}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, and its children with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


def _descendants(pid: int) -> Iterator[int]:
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            yield int(child)
            yield from _descendants(int(child))
