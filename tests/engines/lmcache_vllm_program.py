"""As vllm_program, for an engine that has LMCache's connector: `tests.engines.lmcache_server`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from llvmlite.binding import ffi

if TYPE_CHECKING:
    from vllm import LLM

TRIES: Final = 200
PAUSE_S: Final = 0.05


def hide_internals() -> None:
    """Let vLLM for CPUs look at all modules there are: a library of LMCache's answers too much.

    It hands out a C function for any name, `__dict__` among them.
    """
    kind = type(ffi.lib)
    found = kind.__getattr__

    def find(library: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(library, name)

    kind.__getattr__ = find


def answer(engine: LLM, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command. Blocks that LMCache stores are free once a later step has said so."""
    if command["do"] == "generate":
        return generate(engine, command)
    assert command["do"] == "forget", command
    for _ in range(TRIES):
        generate(engine, {"prompts": [[5, 6, 7]], "tokens": 1})
        if engine.reset_prefix_cache():
            return {"forgot": True}
        time.sleep(PAUSE_S)
    return {"forgot": False}


if __name__ == "__main__":
    hide_internals()
    from tests.engines.vllm_program import generate, serve

    serve(answer)
