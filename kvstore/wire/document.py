"""Writes PROTOCOL.md from the messages themselves: `python -m kvstore.wire.document FILE`.

Reads the source of the message files, since their docstrings, also those of fields, are the
documentation. A test compares the file in the repository with what this gives.
"""

from __future__ import annotations

import ast
import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import errors, hints, limits, namespace, segment
from kvstore.wire import framing
from kvstore.wire.messages import CONVERSATIONS, REGISTRY, RETIRED_TAGS, common
from kvstore.wire.messages.base import Message, tag_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HEAD: Final = """\
# The protocol of kvharbor

Generated from `kvstore/wire/` by `make protocol`; do not edit. What a byte means is fixed by
golden vectors in `tests/unit/golden`: a tag is never used twice, and the fields of a message
never change. A later version may add messages; one that has to change gets a new tag.
"""

NEW_PARAGRAPH: Final = "\n\n"

VALUES: Final = (
    (namespace, ("Content", "CacheGroup", "Attention", "Layout")),
    (segment, ("Geometry",)),
    (hints, ("Hints",)),
)
"""Values that messages carry and that live elsewhere."""


def protocol() -> str:
    """The whole document."""
    parts = [HEAD, _frames(), *map(_conversation, CONVERSATIONS), _values(), _errors(), _tags()]
    return "\n".join(parts)


def _frames() -> str:
    spoken = f"{framing.PROTOCOL_VERSION_MIN} to {framing.PROTOCOL_VERSION}"
    return f"""\
## Frames

{_paragraphs(framing).partition(NEW_PARAGRAPH)[2]}

Versions spoken: {spoken}. A frame has at most {limits.FRAME_BYTES_MAX} bytes after its length, in
the greeting {limits.HELLO_BYTES_MAX}. A message is a MessagePack array: its tag, then its fields
in order. Anything that is not exactly a message of the right types ends the connection.
"""


def _conversation(module: ModuleType) -> str:
    name = module.__name__.rpartition(".")[2]
    lines = [f"## {name.capitalize()}", "", _paragraphs(module), ""]
    for node in _classes(module):
        lines += _class(module, node)
    return "\n".join(lines)


def _values() -> str:
    lines = ["## Shared values", "", _paragraphs(common), ""]
    for node in _classes(common):
        lines += _class(common, node)
    for module, wanted in VALUES:
        for node in _classes(module):
            if node.name in wanted:
                lines += _class(module, node)
    return "\n".join(lines)


def _errors() -> str:
    rows = [
        f"| `{kind.code}` | {kind.__name__} | {_first_sentence(kind)} |"
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.KVStoreError)
    ]
    head = ["## Codes of Failure", "", "| code | error | means |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _tags() -> str:
    rows = [f"| {tag} | {kind.__name__} |" for tag, kind in sorted(REGISTRY.items())]
    retired = ", ".join(map(str, sorted(RETIRED_TAGS))) or "none"
    return "\n".join(["## Tags", "", "| tag | message |", "|---|---|", *rows, "",
                      f"Retired, never to be used again: {retired}.", ""])  # fmt: skip


def _class(module: ModuleType, node: ast.ClassDef) -> Iterator[str]:
    """Heading, docstring, and a table of fields or members."""
    kind = getattr(module, node.name)
    is_message = isinstance(kind, type) and issubclass(kind, Message)
    yield f"### {node.name}" + (f" ({tag_of(kind)})" if is_message else "")
    yield ""
    yield _plain(ast.get_docstring(node) or "")
    yield ""
    rows = list(_rows(node, is_enum=issubclass(kind, Enum)))
    if rows:
        yield from ("| field | type | |", "|---|---|---|", *rows, "")


def _rows(node: ast.ClassDef, *, is_enum: bool) -> Iterator[str]:
    for index, item in enumerate(node.body):
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                kind = ast.unparse(annotation).replace("|", "or")
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_enum:
                kind = ast.unparse(value)
            case _:
                continue
        yield f"| `{name}` | `{kind}` | {_docstring_after(node.body, index)} |"


def _docstring_after(body: list[ast.stmt], index: int) -> str:
    match body[index + 1 : index + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return _plain(inspect.cleandoc(text))
        case _:
            return ""


def _classes(module: ModuleType) -> Iterator[ast.ClassDef]:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            yield node


def _paragraphs(module: ModuleType) -> str:
    """The module's docstring, paragraphs kept."""
    return inspect.getdoc(module) or ""


def _first_sentence(kind: type) -> str:
    return _plain(inspect.getdoc(kind) or "").partition(". ")[0].removesuffix(".")


def _plain(text: str) -> str:
    """One line of a table or paragraph."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the document to the file named on the command line."""
    Path(sys.argv[1]).write_text(protocol(), encoding="utf-8")


if __name__ == "__main__":
    main()
