"""As `peers.vllm_child`, for an engine that has LMCache's connector.

vLLM for CPUs looks at all modules there are when it is imported, and a library of LMCache's hands
out a C function for any name, `__dict__` among them: that has to be mended first, in each process
that begins with this file.
"""

from __future__ import annotations

import importlib

from llvmlite.binding import ffi


def hide_internals() -> None:
    """Have the library refuse names that are Python's own."""
    kind = type(ffi.lib)
    found = kind.__getattr__

    def find(library: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(library, name)

    kind.__getattr__ = find


hide_internals()

if __name__ == "__main__":
    importlib.import_module("benchmarks.peers.vllm_child").main()
