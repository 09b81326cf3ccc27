"""What the programs of a pool do alike: how they log, read their configuration, and end.

Owns the order: where our packages come from is checked before anything of `master` or `workers`
is imported by name. Must not know what a program does.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.config import Sources, read_file
from kvstore.errors import InvariantBroken, KVStoreError
from kvstore.exit_codes import ExitCode, exit_code_of
from kvstore.origin import require_one_origin

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

SECTIONS: Final = ("cluster", "master", "worker", "etcd")
"""What a file that all programs share may hold; each reads what concerns it."""


def run_server(program: str, run: Callable[[Sequence[str]], None]) -> None:
    """Run a program with its arguments; ends the process with a line and a code on an error."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        require_one_origin()
        run(sys.argv[1:])
    except InvariantBroken:
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)
    except KVStoreError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(exit_code_of(error))
    except Exception:  # a bug of ours, which must not look like a wrong option
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)


def sources_of(given: argparse.Namespace) -> Sources:
    """Where the configuration comes from: options, the environment, and the file `--config`."""
    file = Path(given.config) if given.config else None
    tables = read_file(file, SECTIONS) if file else {}
    return Sources(file, tables, os.environ, vars(given))
