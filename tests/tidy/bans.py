"""What may not be written here, where, and what to write instead.

The rules are tables; each finding says file, line, what was found and the replacement.
"""

from __future__ import annotations

import ast
import re
import tokenize
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

from tests.tidy.sources import is_within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tidy.sources import Source


@dataclass(frozen=True)
class Ban:
    """A dotted name, or a builtin, that files matching `where` but not `but` may not use."""

    name: str
    instead: str
    where: tuple[str, ...] = ("*",)
    but: tuple[str, ...] = ()

    def covers(self, path: str) -> bool:
        """Tell whether the ban holds in this file."""
        return matches(path, self.where) and not matches(path, self.but)


WALL_CLOCKS: Final = (
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.asctime"),
    *("time.strftime", "time.clock_gettime_ns", "time.CLOCK_REALTIME"),
    *("datetime", "uuid.uuid1", "os.path.getmtime"),
)
NO_WALL_CLOCK: Final = "a Clock's monotonic time: no wall clock decides anything"
OUTSIDE: Final = (
    *("kvstore/cli/*", "benchmarks/*", "tests/etcd_certificates.py"),
    "workers/gateway_http.py",  # an answer names the moment it was made, for its reader
    "workers/sent_spans.py",  # who collects spans puts those of several hosts in order
)
TYPED: Final = "a msgspec Struct through kvstore.wire.encoding"
TIMELESS: Final = ("tests/unit/*", "tests/simulation/*")
SEEDED: Final = "random.Random(seed), handed in by the caller"

NAMES: Final = (
    *(
        Ban(module, TYPED)
        for module in ("pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle")
    ),
    Ban("torch.load", "safetensors, or torch.frombuffer over verified bytes"),
    *(Ban(name, NO_WALL_CLOCK, but=OUTSIDE) for name in WALL_CLOCKS),
    # Of the monotonic clocks the one that goes on while a host is suspended.
    Ban("time.clock_gettime", NO_WALL_CLOCK, but=(*OUTSIDE, "kvstore/clock.py")),
    *(
        Ban(name, "ManualClock: advance it, or wait for the event itself", TIMELESS)
        for name in ("time.sleep", "time.monotonic", "time.monotonic_ns", "time.perf_counter")
    ),
    *(
        Ban(f"random.{name}", SEEDED, but=("kvstore/cli/*",))
        for name in ("random", "randrange", "randint", "choice", "choices", "sample", "shuffle")
    ),
    *(Ban(f"random.{name}", SEEDED, but=("kvstore/cli/*",)) for name in ("uniform", "seed")),
)

BUILTINS: Final = (
    Ban("eval", "a parser of exactly what is expected"),
    Ban("exec", "a function"),
    Ban("hash", "SHA-256 or XXH3: hash() differs from process to process"),
)

FILE_NAMES: Final = ("utils", "util", "helpers", "helper", "manager", "misc")

# An exemption names its codes and says why on the same line.
EXEMPTION: Final = re.compile(r"#\s*(noqa|type:\s*ignore)\b")
REASONED: Final = re.compile(
    r"#\s*(noqa:(\s*[A-Z]+\d+,?)+|type:\s*ignore\[[\w\-, ]+\])[\s#:—-]*(?P<why>.*)"
)
REASON_CHARACTERS_MIN: Final = 8
LEFT_OVER: Final = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether a path matches any of the shell patterns; `*` crosses slashes."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def banned_names(source: Source) -> Iterator[str]:
    """Find imports and uses of banned dotted names."""
    active = [ban for ban in NAMES if ban.covers(source.path)]
    for line, name in sorted(set(source.references())):
        for ban in active:
            if is_within(name, ban.name):
                yield f"{source.path}:{line}: {ban.name}; use {ban.instead}"


def banned_builtins(source: Source) -> Iterator[str]:
    """Find calls of banned builtins; `__hash__` alone may call hash()."""
    exempt = {
        inner
        for node in source.nodes
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__"
        for inner in ast.walk(node)
    }
    bans = {ban.name: ban for ban in BUILTINS if ban.covers(source.path)}
    for node in source.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name), lineno=line) if (
                name in bans and name not in source.names and node not in exempt
            ):
                yield f"{source.path}:{line}: {name}(); use {bans[name].instead}"


def real_waits(source: Source) -> Iterator[str]:
    """Find `asyncio.sleep` of anything but 0 (which only lets others run) where time is virtual."""
    if not matches(source.path, TIMELESS):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and source.dotted(node.func) == "asyncio.sleep":
            match node.args:
                case [ast.Constant(value=0)]:
                    pass
                case _:
                    yield f"{source.path}:{node.lineno}: asyncio.sleep; use ManualClock"


def swallowed_errors(source: Source) -> Iterator[str]:
    """Find handlers of every exception that do nothing."""
    for node in source.nodes:
        match node:
            case ast.ExceptHandler(
                type=None | ast.Name(id="Exception" | "BaseException"),
                body=[ast.Pass() | ast.Continue() | ast.Expr(value=ast.Constant())],
                lineno=line,
            ):
                yield f"{source.path}:{line}: swallows every error; name the errors you expect"


def bad_comments(source: Source) -> Iterator[str]:
    """Find exemptions from a linter without codes and reason, and notes of unfinished work."""
    if not (EXEMPTION.search(source.text) or LEFT_OVER.search(source.text)):
        return  # spares most files the tokenizer, which is slow
    for token in source.tokens:
        if token.type != tokenize.COMMENT:
            continue
        place = f"{source.path}:{token.start[0]}"
        if EXEMPTION.search(token.string):
            reason = REASONED.search(token.string)
            if reason is None or len(reason["why"]) < REASON_CHARACTERS_MIN:
                yield f"{place}: an exemption names its codes and, after them, the reason"
        if LEFT_OVER.search(token.string):
            yield f"{place}: a note of unfinished work; finish it or file it"


def bad_file_names(source: Source) -> Iterator[str]:
    """Find file names that promise nothing."""
    stem = source.path.rpartition("/")[2].removesuffix(".py")
    if stem in FILE_NAMES:
        yield f"{source.path}: a file name says what is in the file"


def violations(source: Source) -> list[str]:
    """Return every finding of this module in one file."""
    return [
        *banned_names(source),
        *banned_builtins(source),
        *real_waits(source),
        *swallowed_errors(source),
        *bad_comments(source),
        *bad_file_names(source),
    ]
