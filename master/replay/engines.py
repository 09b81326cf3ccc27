"""Inference workers without a model: what they compute takes the time that a shape of fleet says.

One engine is all roles: between two steps of the answers that run it computes one chunk of the
prompt whose turn it is, and either may be missing. Must not know of tickets, nor of the master.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import msgspec


class FleetShape(msgspec.Struct, frozen=True):
    """Inference workers that are all alike, each on a host with a pool worker of its own.

    Times are those of a worker whose model is as fast as this; the defaults are round numbers.
    """

    prefills: int = 0
    decodes: int = 0
    both: int = 0
    tokens_per_s: float = 10_000.0
    """Of a prompt that is computed."""
    chunk_tokens: int = 512
    """Of a prompt, computed between two steps of answers."""
    step_s: float = 0.01
    """Of a decode step, whatever runs."""
    step_row_s: float = 0.0
    """More, for each answer that runs."""
    step_token_s: float = 0.0
    """More, for each KV token that is read."""
    capacity_tokens: int = 1_000_000
    batch_max: int = 64
    pool_pages: int = 4096
    """That each host lends."""
    token_bytes: int = 100_000
    """KV of one token, on links."""
    link_bytes_per_s: float = 10e9
    """Of each host, in either direction."""
    rtt_s: float = 0.001
    switches: bool = False
    """Whether workers change between prefill and decode when the master asks them to."""
    switch_s: float = 1.0
    """From when one has left to when it has joined again."""
    layerwise: bool = False
    """KV is pulled while it is computed, as far as ports are free: then only the rest."""


class Prompt(msgspec.Struct, eq=False):
    """To be computed."""

    tokens: int
    """Left."""
    pull_s: float
    """For what others have computed, before its first chunk."""
    done: Callable[[], None]


class Row(msgspec.Struct, eq=False):
    """An answer that runs."""

    tokens: int
    """KV tokens that it had when it began."""
    new_tokens: int
    """Still to come then."""
    done: Callable[[], None]
    began: int = 0
    """Steps that the engine had taken then."""
    is_entered: bool = False
    is_over: bool = False
    """Ended, or taken out."""


class Engine:
    """One worker's queue and batch. `after` calls back after so many seconds."""

    def __init__(
        self, shape: FleetShape, after: Callable[[float, Callable[[], None]], None]
    ) -> None:
        """Idle."""
        self._shape = shape
        self._after = after
        self.prompts: deque[Prompt] = deque()
        self.step_s = 0.0
        """Of the last one with answers in it; 0: there was none."""
        self.running = 0
        """Answers."""
        self._rows: list[tuple[int, int, Row]] = []
        """By the step that is their last; some may be over."""
        self._entering: list[Row] = []
        """From the next step on."""
        self._held_tokens = 0
        self._steps = 0
        self._entered = 0
        self._is_busy = False

    @property
    def queued_tokens(self) -> int:
        """Of prompts, to be computed."""
        return sum(prompt.tokens for prompt in self.prompts)

    def compute(self, prompt: Prompt) -> None:
        """Take in a prompt; the first one that came is the first one that is computed."""
        self.prompts.append(prompt)
        self._go_on()

    def generate(self, row: Row) -> None:
        """Take in an answer, from the next step on."""
        self._entering.append(row)
        self._go_on()

    def generated(self, row: Row) -> int:
        """Tokens of an answer that runs, since it came."""
        return self._steps - row.began if row.is_entered else 0

    def take_out(self, row: Row) -> int:
        """End an answer before its time: what it has generated."""
        count = self.generated(row)
        row.is_over = True
        if row.is_entered:
            self.running -= 1
            self._held_tokens -= row.tokens + count
        return count

    def _enter(self) -> None:
        for row in self._entering:
            if row.is_over:
                continue
            row.began, row.is_entered = self._steps, True
            self._entered += 1
            heappush(self._rows, (self._steps + row.new_tokens, self._entered, row))
            self.running += 1
            self._held_tokens += row.tokens
        self._entering.clear()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        self._enter()
        shape, prompt, took_s = self._shape, None, 0.0
        if self.prompts:
            prompt = self.prompts[0]
            took_s = prompt.pull_s + min(prompt.tokens, shape.chunk_tokens) / shape.tokens_per_s
            prompt.pull_s = 0.0
        if self.running:
            took_s += shape.step_s + shape.step_row_s * self.running
            took_s += shape.step_token_s * self._held_tokens
            self.step_s = took_s
        elif prompt is None:
            return
        self._is_busy = True
        self._after(took_s, partial(self._went_on, prompt, is_step=self.running > 0))

    def _went_on(self, prompt: Prompt | None, *, is_step: bool) -> None:
        if is_step:
            self._steps += 1
            self._held_tokens += self.running
        while self._rows and (self._rows[0][2].is_over or self._rows[0][0] <= self._steps):
            row = heappop(self._rows)[2]
            if not row.is_over:
                self.take_out(row)
                row.done()
        if prompt is not None:
            prompt.tokens -= min(prompt.tokens, self._shape.chunk_tokens)
            if not prompt.tokens:
                self.prompts.popleft()
                prompt.done()
        self._is_busy = False
        self._go_on()
