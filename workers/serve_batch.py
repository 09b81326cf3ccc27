"""The thread that runs an engine: commands go in between steps, tokens come out as they are made.

Owns the thread. Who listens to a request's tokens is called in this thread, and must not block.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import DynamicCache

    from workers.engine import AnyEngine, EngineRequest, Generated, Taken

    Listener = Callable[[Generated | Taken], None]

T = TypeVar("T")

SMOOTHING: Final = 0.2
"""Weight of the latest step in the mean of their times."""


class Batch:
    """An engine at work. Thread-safe."""

    def __init__(self, engine: AnyEngine, broken: Callable[[BaseException], None]) -> None:
        """Start the thread. `broken` hears of an error of the engine, after which nothing runs."""
        self._engine = engine
        self._broken = broken
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._held: dict[str, int] = {}
        self.step_s = 0.0
        """Time of a step lately; 0: none was taken."""
        self.queued_tokens = 0
        """Of prompts that are computed here."""
        self.tokens_per_s = 0.0
        """Of the latest chunk of a prompt, with the answers that it was computed beside."""
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._thread.start()

    def add(
        self,
        request: EngineRequest,
        cache: DynamicCache,
        listener: Listener,
    ) -> Future[None]:
        """Let a request join; its tokens go to `listener`. Errors as Engine.add.

        Taken, without a token, says that it had to leave, for want of room.
        """

        def join() -> None:
            self._engine.add(request, cache)
            self._listeners[request.id] = listener
            self._held[request.id] = len(request.tokens)

        return self._do(join)

    def cancel(self, request_id: str) -> Future[None]:
        """Drop a request; also one that does not run."""

        def drop() -> None:
            self._engine.cancel(request_id)
            self._forget(request_id)

        return self._do(drop)

    def export(self, request_id: str) -> Future[Taken | None]:
        """Take a request out, to go on elsewhere; None for one that does not run any more."""

        def take() -> Taken | None:
            if request_id not in self._engine.running:
                return None
            self._forget(request_id)
            return self._engine.export(request_id)

        return self._do(take)

    def look(self, request_id: str) -> Future[Taken | None]:
        """What there is of a request that goes on; None for one that does not run any more."""

        def see() -> Taken | None:
            return self._engine.look(request_id) if request_id in self._engine.running else None

        return self._do(see)

    @property
    def held(self) -> dict[str, int]:
        """Tokens of each running request, prompt and generated."""
        return dict(self._held)

    def close(self) -> None:
        """End after the present step."""
        self._commands.put(None)
        self._thread.join()

    def _do(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:  # the caller's, who waits for it
                    future.set_exception(error)

        self._commands.put(command)
        return future

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            self._broken(error)
            raise

    def _obey(self) -> bool:
        """Carry out what was asked for; waits for it where nothing runs. False: the end."""
        while not self._engine.running or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
            self.queued_tokens = self._engine.waiting_tokens
        return True

    def _step(self) -> None:
        while (crowded := self._engine.crowded_out()) is not None:
            listener = self._listeners[crowded]
            self._forget(crowded)
            listener(self._engine.export(crowded))
        waiting, started = self._engine.waiting_tokens, time.perf_counter()
        generated = self._engine.step()
        took = time.perf_counter() - started
        self.queued_tokens = self._engine.waiting_tokens
        if waiting > self.queued_tokens:
            self.tokens_per_s = (waiting - self.queued_tokens) / took
        self.step_s += (took - self.step_s) * (SMOOTHING if self.step_s else 1.0)
        for one in generated:
            listener = self._listeners[one.request_id]
            self._held[one.request_id] = one.position + 1
            if one.finish is not None:
                self._forget(one.request_id)
            listener(one)

    def _forget(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)
        self._held.pop(request_id, None)
