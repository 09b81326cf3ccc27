"""A decode worker: finds what the pool knows of a prompt, pulls it, computes the rest, answers.

    python -m workers.decode --master HOST:PORT --document FILE --question TEXT...

A client of the pool with a model of its own. With `--alone REPORT` it does without a pool and
computes everything itself, in the same pieces as the run that wrote the report: the prefix that
was reused there, then the rest. (A prompt computed in other pieces differs in the last bits, with
any cache and with none.)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvstore.client.store import KVStore
from kvstore.connectors.transformers import PooledPrefix
from kvstore.hints import Hints
from workers.conversation import asked, question_tokens, read_document
from workers.demo_reports import DecodeReport, Turn, read_report, write_report
from workers.engine_options import engine_parser, load_model, run_program, say, secret_of
from workers.generation import append, generate, warm_up

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from transformers import DynamicCache

    from workers.generation import LanguageModel

PROGRAM: Final = "decode"
ANSWER_TOKENS: Final = 64


class Start(NamedTuple):
    """A prompt with its first tokens' KV in a cache, and what that took."""

    cache: DynamicCache
    reused_tokens: int
    bytes_moved: int = 0
    trouble: str = ""
    cold_s: float | None = None
    """Time to the first token with nothing known, where it had to be measured apart."""


class Prefixes(Protocol):
    """Where the KV of a prompt's beginning comes from, and who gets that of the whole."""

    def fetch(self, tokens: Sequence[int], turn: int) -> Start:
        """The beginning of a chat's prompt in this turn, at least one token short of it."""
        ...

    def store(self, tokens: Sequence[int], cache: DynamicCache, turn: int) -> int:
        """Keep what the cache holds of `tokens`; returns the pages stored."""
        ...


class FromPool:
    """The pool has it, or it is computed."""

    def __init__(self, prefix: PooledPrefix) -> None:
        """Ask nothing yet."""
        self._prefix = prefix

    def fetch(self, tokens: Sequence[int], turn: int) -> Start:
        """What the pool has."""
        cache, fetched = self._prefix.fetch(tokens, hints=Hints(turn=turn))
        return Start(cache, fetched.tokens, fetched.bytes_moved, fetched.trouble)

    def store(self, tokens: Sequence[int], cache: DynamicCache, turn: int) -> int:
        """Into the pool."""
        return self._prefix.store(tokens, cache, hints=Hints(turn=turn)).stored


class Alone:
    """Nobody has it: it is computed, up to where each prompt was split in another run."""

    def __init__(self, language: LanguageModel, splits: Sequence[int]) -> None:
        """`splits` are the reused tokens of each prompt there, in order."""
        self._language = language
        self._splits = iter(splits)
        self._last: tuple[list[int], DynamicCache] = ([], language.empty_cache())

    def fetch(self, tokens: Sequence[int], turn: int) -> Start:
        """Compute the first part of the prompt.

        For the next turn of a chat that is what the last one left behind: there too, the pages of
        an answer hold what was computed as it was generated, token by token.
        """
        split = next(self._splits, 0)
        held, cache = self._last
        if len(held) > split and held[:split] == list(tokens[:split]) and self._goes_on(tokens):
            cold_s = self._cold_s(tokens)
            cache.crop(split - cache.get_seq_length())
            return Start(cache, split, cold_s=cold_s)
        cache = self._language.empty_cache()
        if split:
            append(self._language.model, cache, tokens[:split])
        return Start(cache, split)

    def store(self, tokens: Sequence[int], cache: DynamicCache, turn: int) -> int:
        """Remember it for the next turn of the same chat."""
        self._last = (list(tokens[: cache.get_seq_length()]), cache)
        return 0

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        held, _ = self._last
        return list(tokens[: len(held)]) == held

    def _cold_s(self, tokens: Sequence[int]) -> float:
        started = time.perf_counter()
        append(self._language.model, self._language.empty_cache(), tokens)
        return time.perf_counter() - started


class Talk:
    """One chat: its tokens so far, and which of them were generated."""

    def __init__(self, language: LanguageModel, prefixes: Prefixes, tokens_max: int) -> None:
        """Say nothing yet. Answers have at most `tokens_max` tokens."""
        self._language = language
        self._prefixes = prefixes
        self._tokens_max = tokens_max
        self._tokens: list[int] = []
        self._generated: list[range] = []

    def ask(self, document: str, question: str) -> Turn:
        """Answer the first question."""
        return self._turn(question, question_tokens(self._language.chat, document, question))

    def go_on(self, question: str) -> Turn:
        """Answer another question of the same chat."""
        more = self._language.chat.follow_up(asked(question))
        return self._turn(question, [*self._tokens, *more])

    def _turn(self, question: str, prompt: list[int]) -> Turn:
        started = time.perf_counter()
        number = len(self._generated) + 1
        start = self._prefixes.fetch(prompt, number)
        fetched = time.perf_counter()
        first = append(self._language.model, start.cache, prompt[start.reused_tokens :])
        answered = time.perf_counter()
        answer = generate(self._language, start.cache, first, self._tokens_max)
        turn = Turn(
            question=question,
            prompt_tokens=len(prompt),
            reused_tokens=start.reused_tokens,
            reused_generated_tokens=sum(
                len(range(span.start, min(span.stop, start.reused_tokens)))
                for span in self._generated
            ),
            generated=tuple(answer.generated),
            text=answer.text,
            first_token_s=answered - started if start.cold_s is None else start.cold_s,
            fetch_s=fetched - started,
            bytes_moved=start.bytes_moved,
            pages_stored=self._prefixes.store([*prompt, *answer.tokens], start.cache, number),
            trouble=start.trouble,
        )
        self._generated.append(range(len(prompt), len(prompt) + len(answer.tokens)))
        self._tokens = [*prompt, *answer.tokens]
        return turn


def converse(
    language: LanguageModel, prefixes: Prefixes, document: str, options: argparse.Namespace
) -> list[Turn]:
    """Answer every question, each in a chat of its own; the last chat goes on."""
    turns: list[Turn] = []
    talk = Talk(language, prefixes, options.answer_tokens)
    for question in options.question:
        talk = Talk(language, prefixes, options.answer_tokens)
        turns.append(talk.ask(document, question))
        _show(turns[-1])
    for question in options.follow_up:
        turns.append(talk.go_on(question))
        _show(turns[-1])
    return turns


def _show(turn: Turn) -> None:
    trouble = f" ({turn.trouble})" if turn.trouble else ""
    pulled = f", {turn.reused_tokens} of them from the pool" if turn.bytes_moved else ""
    say(
        PROGRAM,
        f"{turn.question}\n      {turn.text}\n      {turn.prompt_tokens} tokens{pulled}; "
        f"first token after {turn.first_token_s:.2f} s{trouble}",
    )


def run(options: argparse.Namespace) -> None:
    """Load, connect unless alone, answer."""
    document = read_document(options.document)
    if options.alone is not None:
        other = read_report(options.alone, DecodeReport)
        language = _loaded(options)
        alone = Alone(language, [turn.reused_tokens for turn in other.turns])
        turns = converse(language, alone, document, options)
    else:
        with KVStore.connect(options.master, secret=secret_of(options), name=PROGRAM) as store:
            language = _loaded(options)
            prefix = PooledPrefix(store, language.model, language.model_id)
            turns = converse(language, FromPool(prefix), document, options)
    if options.report is not None:
        write_report(options.report, DecodeReport(os.getpid(), tuple(turns)))


def _loaded(options: argparse.Namespace) -> LanguageModel:
    started = time.perf_counter()
    language = load_model(options.model)
    warm_up(language)
    say(PROGRAM, f"{language.model_id} is ready after {time.perf_counter() - started:.1f} s")
    return language


def main() -> None:
    """Run the program; ends the process."""
    parser = engine_parser("workers.decode", "Answers questions about a document.")
    parser.add_argument(
        "--question", action="append", required=True, metavar="TEXT", help="each starts a chat"
    )
    parser.add_argument(
        "--follow-up", action="append", default=[], metavar="TEXT", help="goes on with the last"
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=ANSWER_TOKENS, metavar="N", help="at most so many"
    )
    parser.add_argument(
        "--alone", type=Path, metavar="REPORT", help="no pool: compute all, split as in that run"
    )
    options = parser.parse_args(sys.argv[1:])
    run_program("workers.decode", lambda: run(options))


if __name__ == "__main__":
    main()
