"""What commands that start programs of ours share: how those run, and how the command ends."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from kvstore.errors import KVStoreError
from kvstore.exit_codes import exit_code_of

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    # Threads that wait for one another go to sleep: the others need the cores, too.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""In the environment of programs, where the operator says nothing else."""


def conclude(command: str, run: Callable[[], int]) -> NoReturn:
    """End the process as `run` does: with its exit code, or with an error's and a line of why.

    SIGTERM ends it in order, so that `run` can clear up.
    """
    signal.signal(signal.SIGTERM, _stop)
    try:
        code = run()
    except KVStoreError as error:
        sys.stderr.write(f"{command}: {error}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(code)


def _stop(signum: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + signum)
