"""How long functions, files and lines are, and what is too long."""

from __future__ import annotations

import ast
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.tidy.sources import Source

FUNCTION_LINES_MAX: Final = 60
FUNCTION_LINES_MEDIAN_MAX: Final = 8
FILE_LINES_MAX: Final = 400
COLUMNS_MAX: Final = 100

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> Iterator[Function]:
    """Yield every function and method, nested ones too."""
    for node in source.nodes:
        if isinstance(node, Function):
            yield node


def docstring_lines(node: Function) -> range:
    """Return the lines that the docstring takes, an empty range if there is none."""
    first = node.body[0]
    match first:
        case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(end)):
            return range(first.lineno, end + 1)
        case _:
            return range(0)


def code_lines(source: Source, node: Function) -> int:
    """Count the lines of a function, signature included, that hold code.

    Blank lines, comments and the docstring are free, so that nobody saves on them.
    """
    assert node.end_lineno is not None
    span = range(node.lineno, node.end_lineno + 1)
    skipped = docstring_lines(node)
    return len(source.code_lines.intersection(span).difference(skipped))


def too_long_functions(source: Source) -> list[str]:
    """Name the functions of a file that exceed the limit."""
    sizes = [(node, code_lines(source, node)) for node in functions(source)]
    return [
        f"{source.path}:{node.lineno} {node.name}: {size} code lines, at most {FUNCTION_LINES_MAX}"
        for node, size in sizes
        if size > FUNCTION_LINES_MAX
    ]


def too_long_files(source: Source) -> list[str]:
    """Name the file if it has too many lines, and its lines that are too wide."""
    found = [
        f"{source.path}:{number}: {len(line)} columns, at most {COLUMNS_MAX}"
        for number, line in enumerate(source.lines, 1)
        if len(line) > COLUMNS_MAX
    ]
    if len(source.lines) > FILE_LINES_MAX:
        found.append(f"{source.path}: {len(source.lines)} lines, at most {FILE_LINES_MAX}")
    return found


def median_code_lines(files: Sequence[Source]) -> float:
    """Return the median size of all functions of the given files, 0 if there are none."""
    sizes = [code_lines(source, node) for source in files for node in functions(source)]
    return median(sizes) if sizes else 0.0
