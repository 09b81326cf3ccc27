"""A vLLM engine in one mode, over a pool that a test breaks and starts anew beneath it."""

from __future__ import annotations

import os
import signal
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.client.store import KVStore
from tests.cluster.pages import PAGE_TOKENS, Pages
from tests.cluster.servers import until, write_config
from tests.cluster.up import Up, remove_segments
from tests.engines.conftest import assert_idle
from tests.engines.models import GROUPED, text
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.worst import LENGTH, PROMPT, RETRY_S, Pausing
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.vllm_engine import Generated

HIT: Final = (LENGTH - 1) // BLOCK * BLOCK
OTHER: Final = text(LENGTH, seed=1)
SMALLEST_BLOCK: Final = 16
"""vLLM may take smaller blocks than it is told, for latents."""
OLDEST_GO_FIRST: Final = {"master": {"eviction": "lru"}}
"""However often they were read: others come but once, and are to drive out the prompt."""
DRAM: Final = "64MiB"
DRAM_BYTES: Final = 64 << 20
CHAIN: Final = 64
"""Pages of each chain that others put."""
OTHERS: Final = count(1)
"""Tokens of which each such chain is made, another for each."""
LATENT_BYTES: Final = SMALLEST_BLOCK * 576 * 2
LAYERS: Final = 2
"""Of each cache group of `tests.engines.models`."""


class Mode(NamedTuple):
    """A kind of model, and a way to run it."""

    kind: str
    own_process: bool = False
    ranks: int = 1
    dtype: str = "float32"

    @property
    def piece_bytes(self) -> int:
        """What one rank has of a block, in one cache group."""
        heads = GROUPED["num_key_value_heads"] // self.ranks
        dense = BLOCK * heads * 2 * GROUPED["head_dim"] * 4
        return LAYERS * (LATENT_BYTES if self.kind == "latent" else dense)


class Rig:
    """One engine, its pool, and every answer to the prompt that is right."""

    def __init__(self, mode: Mode, model: Path, folder: Path) -> None:
        """Remember what to start."""
        self.mode = mode
        self.pausing = Pausing(folder)
        self._listen = f"127.0.0.1:{free_port()}"
        self._data_dir = folder / "pool"
        config = folder / "pool.toml"
        write_config(config, OLDEST_GO_FIRST)
        self._options = (f"--listen={self._listen}", f"--config={config}")
        self._up: Up | None = None
        self._right: list[list[int]] = []
        bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if mode.ranks > 1 else {}
        self.engine = VllmEngine(
            model, self._listen, folder=folder, own_process=mode.own_process,
            connector=("PausingConnector", "tests.engines.vllm_faults"),
            environment={**self.pausing.environment, **bound},
            options={
                "tensor_parallel_size": mode.ranks, "dtype": mode.dtype,
                "disable_log_stats": False,
            },
        )  # fmt: skip

    @property
    def up(self) -> Up:
        """The pool's present life."""
        assert self._up is not None
        return self._up

    def learn(self) -> None:
        """What is right: computed, without a pool, from every split that a load may leave.

        Of some models KV and tokens differ by how much is computed at once, so the second answer
        is of what came before the split and of what was then computed behind it.
        """
        for split in range(0, HIT + 1, SMALLEST_BLOCK):
            self.engine.forget()
            if split:
                self.engine.generate([PROMPT[:split] + OTHER[split:]], tokens=1)
            for _ in range(2):
                self._right += self.engine.generate([PROMPT]).tokens

    def heal(self) -> None:
        """Undo the worst: whoever was stopped goes on, and a pool that has ended begins anew."""
        for each in (self.pausing.remove, self.pausing.pause):
            each.unlink(missing_ok=True)
        if self._up is None or self._up.process.poll() is not None:
            self._up = Up(self._data_dir, *self._options, dram=DRAM).__enter__()
        for part in ("worker", "master"):
            os.kill(self.up.pid(part), signal.SIGCONT)

    def kill(self, part: str) -> None:
        """Kill master or worker; the pool ends with either."""
        os.kill(self.up.pid(part), signal.SIGKILL)
        self.up.wait()

    def end(self) -> None:
        """No pool any more."""
        if self._up is not None:
            self._up.__exit__()
        remove_segments(self._data_dir)

    def hit(self) -> int:
        """Tokens that the engine need not compute, having forgotten all; its answer is right."""
        self.engine.forget()
        return self.checked(self.engine.generate([PROMPT]))

    def checked(self, came: Generated) -> int:
        """Tokens that were not computed for a right answer."""
        assert came.tokens[0] in self._right
        return came.cached[0]

    def be_warm(self) -> None:
        """Wait until the pool gives the engine the whole prompt."""
        until("all is in the pool", lambda: self.hit() == HIT, RETRY_S)

    def failed_loads(self) -> int:
        """How many the engine has told of."""
        return self.engine.metrics()["failed_loads"]

    def flood(self) -> None:
        """Have others put twice what fits, in pieces as large: what nobody leases goes."""
        size = self.mode.piece_bytes
        with Pages(self.up.master, "shm", "others") as others:
            opened, source = others.open(size), bytes(size)
            for number in islice(OTHERS, 2 * DRAM_BYTES // (size * CHAIN)):
                chain = opened.chain([number] * (CHAIN * PAGE_TOKENS))
                others.store.put(opened, chain, source, [0] * CHAIN, wait=False)

    def abort(self) -> None:
        """Take a prompt back in the middle of its load, or right after it in the one process."""
        self.engine.forget()
        self.pausing.stop_the_next()
        self.engine.tell(do="abort", prompt=PROMPT, when=str(self.pausing.here))
        until("a load begins", self.pausing.here.exists)
        if self.mode.own_process:
            assert self.engine.reply() == {"left": 0}
        self.pausing.pause.unlink()
        if not self.mode.own_process:
            assert self.engine.reply() == {"left": 0}

    def assert_nothing_is_held(self) -> None:
        """No lease on a page of the prompt, no plan, no pin, and no memory only reserved.

        What a load that failed had leased lapses: some copy of it may be on its way yet.
        """
        until("nothing of the prompt withstands others", self._is_forgotten, RETRY_S)
        assert_idle(self.up.master)
        with KVStore.connect(self.up.master) as store:
            until(
                "nothing is reserved",
                lambda: not any(each.reserved_bytes for each in store.stat().segments),
            )
        if not self.mode.own_process:
            assert self.engine.counts()["open_requests"] == 0

    def _is_forgotten(self) -> bool:
        self.flood()
        return self.hit() == 0
