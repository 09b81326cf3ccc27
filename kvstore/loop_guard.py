"""What an event loop of a server does with exceptions that nobody awaits: it has the server end.

asyncio logs such an exception and goes on without the callback or task that raised it, so a server
would look alive and not do its work. This is the backstop behind owners that look after their
tasks themselves. Must not know how a server ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvariantBroken, KVStoreError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Any


def tell_bugs(loop: asyncio.AbstractEventLoop, broken: Callable[[BaseException], None]) -> None:
    """Have `broken` hear, in the loop's thread, of every exception that only a bug explains.

    All are logged as before. What a connection's own handler raised ends that connection, and what
    the system refused (OSError) or a future held for nobody (KVStoreError) was expected: these are
    logged alone.
    """

    def heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is None or "transport" in context or isinstance(error, OSError):
            return
        was_expected = isinstance(error, KVStoreError) and not isinstance(error, InvariantBroken)
        if was_expected and "handle" not in context:
            return
        broken(error)

    loop.set_exception_handler(heard)
