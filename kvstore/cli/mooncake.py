"""`kvharbor mooncake-shim`: run a program of Mooncake Store's on this pool, unchanged."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.cli.options import MASTER, Master, SecretFile
from kvstore.errors import BadValue

SITE: Final = Path(__file__).parent.parent / "connectors" / "mooncake" / "site_hook"
EXAMPLE: Final = "Example: kvharbor mooncake-shim --master 10.0.0.11:7700 -- python program.py"
WITHOUT_HOOK: Final = frozenset("IES")
"""Options of Python with which it looks at no PYTHONPATH, or at no sitecustomize."""
ENDING: Final = frozenset("cm")
"""Behind these there are only the program's own arguments."""
TAKING_REST: Final = ENDING | frozenset("WX")
TAKING_WORDS: Final = frozenset(("-W", "-X", "--check-hash-based-pycs"))
"""Options whose value may be the next word."""
DEFAULT_AGAIN: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; who is not Python expects to be ended by them."""
Namespace = Annotated[
    str,
    typer.Option(help="Programs that name the same one share objects.", show_default="mooncake"),
]
Command = Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")]


def mooncake_shim(
    command: Command,
    master: Master = MASTER,
    secret_file: SecretFile = None,
    namespace: Namespace = "",
) -> None:
    """Run a program whose `mooncake.store` is this pool.

    It becomes the program: signals go to it, and its exit code is the shim's. What it starts by
    Python is on the pool, too. The installed Mooncake is left alone.
    """
    _check(command)
    environment = shimmed(os.environ, master, secret_file, namespace)
    for number in DEFAULT_AGAIN:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise BadValue("command", command[0], f"a program that can be run ({error})") from error


def shimmed(
    environment: os._Environ[str] | dict[str, str],
    master: str,
    secret_file: Path | None,
    namespace: str,
) -> dict[str, str]:
    """The environment of the program."""
    found = dict(environment)
    paths = [str(SITE), *filter(None, [found.get("PYTHONPATH", "")])]
    found |= {"PYTHONPATH": os.pathsep.join(paths), "KVHARBOR_MASTER": master}
    if secret_file is not None:
        found["KVHARBOR_CLUSTER_SECRET_FILE"] = str(secret_file)
    if namespace:
        found["KVHARBOR_MOONCAKE_NAMESPACE"] = namespace
    return found


def _check(command: list[str]) -> None:
    """A Python that passes our hook by would use the installed Mooncake, and nobody would know."""
    words = iter(command[1:] if "python" in Path(command[0]).name else ())
    for word in words:
        if word in TAKING_WORDS:
            next(words, None)
        elif not word.startswith("-") or word == "-":
            return
        elif not word.startswith("--") and _options_of(word) & WITHOUT_HOOK:
            raise BadValue("command", word, "Python without -I, -E and -S, which pass the shim by")
        elif _options_of(word) & ENDING:
            return


def _options_of(word: str) -> set[str]:
    """The letters of one word of options, without the value of the last of them."""
    found: set[str] = set()
    for letter in word[1:]:
        found.add(letter)
        if letter in TAKING_REST:
            break
    return found
