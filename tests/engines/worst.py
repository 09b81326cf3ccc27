"""The worst that can happen to an engine's pool between a lookup and a load, on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.cli.places import places_of
from tests.cluster.segment_files import sealed
from tests.cluster.servers import until
from tests.engines.models import text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up
    from tests.engines.vllm_engine import Generated, VllmEngine

LENGTH = 200
PROMPT = text(LENGTH)
RETRY_S = 45.0
"""An engine has looked for its pool again by then: its longest pause is 30 s."""


class Pausing:
    """How a test stops an engine before a load, while it does its worst; see vllm_faults."""

    def __init__(self, folder: Path) -> None:
        self.pause, self.remove = folder / "pause", folder / "remove"
        self.here = self.pause.with_suffix(".here")
        self.environment = {
            "KVHARBOR_TEST_PAUSE": str(self.pause),
            "KVHARBOR_TEST_REMOVE": str(self.remove),
        }

    def generate(self, engine: VllmEngine, do_worst: Callable[[], object]) -> Generated:
        """Have it load; do the worst between its lookup and its load."""
        engine.forget()
        self.stop_the_next()
        engine.begin_generate([PROMPT])
        until("a load begins", self.here.exists)
        do_worst()
        self.pause.unlink()
        return engine.end_generate()

    def stop_the_next(self) -> None:
        """Let no load begin; of several ranks the last may have come late to the one before."""
        self.here.unlink(missing_ok=True)
        self.pause.touch()


def spoil(up: Up) -> int:
    """Turn a bit over in every page of the pool; how many there were."""
    spoilt = 0
    for path in places_of(up.data_dir).segment_dir.glob("*dram*"):
        with path.open("r+b", buffering=0) as file:
            for at, _ in list(sealed(path)):
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes((byte ^ 1,)))
                spoilt += 1
    return spoilt
