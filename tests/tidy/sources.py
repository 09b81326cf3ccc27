"""The files of the repository as text and syntax trees, for the checks beside this module."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("kvstore", "master", "policies", "workers")
TESTS: Final = ("tests",)
EVERYTHING: Final = (*PACKAGES, *TESTS, "benchmarks")
NOT_CODE: Final = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The text, line by line."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """The tokens, comments included."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that hold code or a docstring: neither blank nor a comment alone."""
        code = (token for token in self.tokens if token.type not in NOT_CODE)
        return {line for token in code for line in range(token.start[0], token.end[0] + 1)}

    @cached_property
    def names(self) -> dict[str, str]:
        """What each imported name stands for: `from time import sleep as s` is s: time.sleep."""
        found: dict[str, str] = {}
        for node in self.nodes:
            match node:
                case ast.Import(names=aliases):
                    for alias in aliases:
                        top = alias.name.partition(".")[0]
                        found[alias.asname or top] = alias.name if alias.asname else top
                case ast.ImportFrom(module=str(module), names=aliases, level=0):
                    for alias in aliases:
                        found[alias.asname or alias.name] = f"{module}.{alias.name}"
        return found

    def dotted(self, node: ast.AST) -> str | None:
        """Return the full name that an expression refers to, or None if it is not an import's."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attr):
                base = self.dotted(value)
                return f"{base}.{attr}" if base else None
            case _:
                return None

    def references(self) -> Iterator[tuple[int, str]]:
        """Yield line and full name of every import and every use of an imported name."""
        for node in self.nodes:
            match node:
                case ast.Import(names=aliases):
                    yield from ((node.lineno, alias.name) for alias in aliases)
                case ast.ImportFrom(module=str(module), names=aliases, level=0):
                    yield from ((node.lineno, f"{module}.{alias.name}") for alias in aliases)
                case ast.Attribute(lineno=line) | ast.Name(lineno=line):
                    name = self.dotted(node)
                    if name:
                        yield line, name


def sources(folders: tuple[str, ...]) -> Iterator[Source]:
    """Read every Python file below the given top-level folders, in the order of their paths.

    One by one: a million nodes of syntax, kept, cost the collector more than it takes to make them.
    """
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    for path in paths:
        yield Source(path.relative_to(ROOT).as_posix(), path.read_text())


def is_within(name: str, prefix: str) -> bool:
    """Tell whether a dotted name is the prefix itself or lies below it."""
    return name == prefix or name.startswith(f"{prefix}.")
