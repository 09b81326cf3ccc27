"""KV events of a real vLLM engine, from its own publisher, for what it has put into the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from tests.cluster.servers import until
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.worst import LENGTH, PROMPT, Pausing
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

PAGES = (LENGTH - 1) // BLOCK
SHORT = [7, 8, 9]
"""Has no full block: gives vLLM a step, in which it publishes what there is."""


class Router:
    """Hears what an engine publishes, as routers do."""

    def __init__(self) -> None:
        """Listen where the engine is going to be."""
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)
        self.heard: list[dict[str, Any]] = []

    def hear(self) -> None:
        """Take in what has come."""
        while self._socket.poll(0):
            *_, payload = self._socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            self.heard += events

    def of(self, kind: str, medium: str) -> list[dict[str, Any]]:
        """Events of that kind, in the order in which they came."""
        return [e for e in self.heard if (e["type"], e.get("medium")) == (kind, medium)]

    def close(self) -> None:
        """Listen no more."""
        self._socket.close(linger=0)


def test_routers_hear_what_an_engine_has_put_into_the_pool(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    router, pausing = Router(), Pausing(tmp_path)
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": router.endpoint.replace("127.0.0.1", "*"),
    }

    def count(kind: str, at_least: int) -> list[dict[str, Any]]:
        """Events of the pool's blocks, once so many have come."""

        def have_come() -> bool:
            engine.generate([SHORT], tokens=2)
            router.hear()
            return len(router.of(kind, "STORAGE")) >= at_least

        until(f"{at_least} of {kind} are heard", have_come)
        return router.of(kind, "STORAGE")

    with VllmEngine(
        model_of("grouped"), pool.master, folder=tmp_path, options={"kv_events_config": published},
        connector=("PausingConnector", "tests.engines.vllm_faults"),
        environment=pausing.environment,
    ) as engine:  # fmt: skip
        engine.generate([PROMPT], tokens=2)
        stored = count("BlockStored", PAGES)
        assert [each["token_ids"] for each in stored] == [
            PROMPT[at : at + BLOCK] for at in range(0, PAGES * BLOCK, BLOCK)
        ]
        assert {(each["locality"], each["block_size"]) for each in stored} == {("REMOTE", BLOCK)}
        hashes = [block for each in stored for block in each["block_hashes"]]
        assert [each["parent_block_hash"] for each in stored] == [None, *hashes[:-1]]
        own = [block for e in router.of("BlockStored", "GPU") for block in e["block_hashes"]]
        assert own[:PAGES] == hashes  # vLLM's name for a block is the same in any medium
        assert router.of("BlockRemoved", "STORAGE") == []

        pausing.remove.touch()  # all pages but the first, before they are loaded
        pausing.generate(engine, lambda: None)
        removed = count("BlockRemoved", PAGES - 1)
        assert [block for each in removed for block in each["block_hashes"]] == hashes[1:]
        again = count("BlockStored", 2 * PAGES - 1)[PAGES:]
        assert set(hashes[1:]) <= {block for each in again for block in each["block_hashes"]}
    router.close()
