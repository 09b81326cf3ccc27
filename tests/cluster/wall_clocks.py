"""Wall clocks of processes that a test sets: each as far off as it says, from one call to the next.

A library that is loaded before all others answers what the system is asked for the time of day, and
adds what stands for the process in a file that all share. Programs without the C library, like
etcd, do not notice.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

SLOT: Final = struct.Struct("=q")
PIDS_MAX: Final = 1 << 22
"""That Linux gives out."""
SHIFTS_FILE: Final = "WALL_CLOCK_SHIFTS"
SOURCE: Final = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shifts;

__attribute__((constructor)) static void map_shifts(void) {
  int file = open(getenv("WALL_CLOCK_SHIFTS"), O_RDONLY | O_CLOEXEC);
  void *found = mmap(NULL, 8 << 22, PROT_READ, MAP_SHARED, file, 0);
  if (found == MAP_FAILED) abort();
  close(file);
  shifts = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (!failed && is_wall && shifts) now->tv_sec += shifts[getpid()];
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


class WallClocks:
    """A context manager: programs that are started inside have wall clocks that can be set."""

    def __init__(self, folder: Path) -> None:
        """Build the library there; a test that cannot is skipped, and says so."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler to build wall clocks with")
        self._library = folder / "wall_clocks.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(self._library), "-"]
        subprocess.run(command, input=SOURCE, text=True, check=True)
        self._path = folder / "shifts"
        with self._path.open("wb") as file:
            file.truncate(PIDS_MAX * SLOT.size)
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        patch = self._undo.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LD_PRELOAD", str(self._library))
        patch.setenv(SHIFTS_FILE, str(self._path))
        file = self._undo.enter_context(self._path.open("r+b"))
        self._shifts = self._undo.enter_context(mmap.mmap(file.fileno(), 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def set(self, pid: int, seconds: int) -> None:
        """From now on this process takes the time of day for so much later than it is."""
        SLOT.pack_into(self._shifts, pid * SLOT.size, seconds)

    def is_set_in(self, pid: int) -> bool:
        """Whether the library is in that process."""
        with open(f"/proc/{pid}/maps") as maps:
            return str(self._library) in maps.read()


def seconds_of_day(clocks: WallClocks, seconds: int) -> int:
    """What a program that is so far off takes the time of day for."""
    shell = subprocess.Popen(
        ["sh", "-c", "read go; exec date +%s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    clocks.set(shell.pid, seconds)
    said, _ = shell.communicate("\n")
    return int(said)
