"""Limits on functions, files and lines, and proof that each limit catches an offender."""

from __future__ import annotations

import pytest

from tests.tidy import sizes
from tests.tidy.sources import EVERYTHING, PACKAGES, Source, sources

SHORT = '''
def short(
    value: int,  # a comment does not make this line free
) -> int:
    """A docstring
    of two lines.
    """

    # Comments and blank lines
    # are free.
    return (
        value
    )
'''


def function_of(lines: int) -> str:
    return "def long() -> None:\n" + "    print()\n" * (lines - 1)


def size_of_first(text: str) -> int:
    source = Source("made_up.py", text)
    node = next(sizes.functions(source))
    return sizes.code_lines(source, node)


@pytest.fixture(scope="module")
def packages() -> list[Source]:
    """What we ship, read and parsed once."""
    return list(sources(PACKAGES))


def test_no_function_is_too_long(packages: list[Source]) -> None:
    found = [line for source in packages for line in sizes.too_long_functions(source)]
    assert not found, "\n".join(found)


def test_the_median_function_is_short(packages: list[Source]) -> None:
    found = sizes.median_code_lines(packages)
    assert found <= sizes.FUNCTION_LINES_MEDIAN_MAX


def test_no_file_is_too_long_or_too_wide() -> None:
    found = [line for source in sources(EVERYTHING) for line in sizes.too_long_files(source)]
    assert not found, "\n".join(found)


def test_only_code_counts() -> None:
    assert size_of_first(SHORT) == 6


def test_a_string_of_several_lines_counts_as_its_lines() -> None:
    assert size_of_first('def f() -> str:\n    x = """a\n\n    b"""\n    return x\n') == 5


def test_a_function_one_line_over_the_limit_is_found() -> None:
    limit = sizes.FUNCTION_LINES_MAX
    assert not sizes.too_long_functions(Source("made_up.py", function_of(limit)))
    (found,) = sizes.too_long_functions(Source("made_up.py", function_of(limit + 1)))
    assert found == f"made_up.py:1 long: {limit + 1} code lines, at most {limit}"


def test_methods_and_nested_functions_are_measured() -> None:
    text = "class A:\n  async def outer(self) -> None:\n    def inner() -> None:\n      pass\n"
    names = [node.name for node in sizes.functions(Source("made_up.py", text))]
    assert sorted(names) == ["inner", "outer"]


def test_a_file_one_line_over_the_limit_is_found() -> None:
    text = "x = 1\n" * sizes.FILE_LINES_MAX
    assert not sizes.too_long_files(Source("made_up.py", text))
    (found,) = sizes.too_long_files(Source("made_up.py", text + "x = 1\n"))
    assert "401 lines" in found


def test_a_line_one_column_over_the_limit_is_found() -> None:
    text = "x" * sizes.COLUMNS_MAX
    assert not sizes.too_long_files(Source("made_up.py", text))
    (found,) = sizes.too_long_files(Source("made_up.py", text + "x"))
    assert found == "made_up.py:1: 101 columns, at most 100"


def test_the_median_of_nothing_is_zero() -> None:
    assert sizes.median_code_lines([]) == 0
