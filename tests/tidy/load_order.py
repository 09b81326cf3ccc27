"""Which of our modules load which others by being imported, and whether any order of that works.

A module cannot be imported first only if what it loads comes back to it, which then finds it half
made. So no cycle means that each can, and one process that imports all of them shows the rest.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tests.tidy.sources import is_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.tidy.sources import Source


def module_name(source: Source) -> str:
    """The dotted name of a file."""
    path = PurePosixPath(source.path).with_suffix("")
    return ".".join(path.parts).removesuffix(".__init__")


def cycle(modules: Iterable[Source]) -> list[str]:
    """Modules that load each other in turn, the first one again at the end; empty if none do."""
    sources = {module_name(source): source for source in modules}
    try:
        TopologicalSorter(
            {name: set(_loaded(name, source, sources)) for name, source in sources.items()}
        ).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _loaded(name: str, source: Source, known: Iterable[str]) -> Iterator[str]:
    """Modules that loading this one loads: packages come before what is in them."""
    for target in _targets(_at_load(source.tree)):
        for module in known:
            # Whatever is in a package finds it begun already, whoever is imported first.
            if is_within(target, module) and not is_within(name, module):
                yield module


def _targets(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                yield from (f"{module}.{alias.name}" for alias in aliases)


def _at_load(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.stmt():
                yield child
        yield from _at_load(child)
