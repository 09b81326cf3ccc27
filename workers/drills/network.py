"""Two hosts on one machine: network namespaces with two links between them, which fail on purpose.

Owns the namespaces. This process goes into one of its own, the kernel's network of the machine is
never touched, and all of it is gone when the processes in it are. Needs root, and iproute2.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import AccessDenied, ConfigError
from workers.drills.processes import others, until

if TYPE_CHECKING:
    from typing import Self

RAILS: Final = (1, 2)
"""Links between the hosts, each with a network of its own."""
TOOLS: Final = ("ip", "nsenter", "setpriv", "tc", "unshare")
DRAWS: Final = 10_000
START_S: Final = 10.0
_CLONE_NEWNET: Final = 0x40000000
_RANDOM: Final = 4_294_963_256
"""What a classic packet filter reads a random number from."""


def near(rail: int) -> str:
    """This host's address on a link."""
    return f"10.77.{rail}.1"


def far(rail: int) -> str:
    """The other host's address on a link."""
    return f"10.77.{rail}.2"


def require_network() -> None:
    """AccessDenied without root, ConfigError naming the tools that are not there."""
    if os.geteuid():
        raise AccessDenied("network namespaces are made by root alone: run it as root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"not found on PATH: {', '.join(missing)} (iproute2 and util-linux)")


def loss_program(fraction: float) -> str:
    """A packet filter, as `tc` reads it, that drops one packet in so many, at random."""
    dropped = round(fraction * DRAWS)
    lines = (
        f"32 0 0 {_RANDOM}",  # a = a random number
        f"148 0 0 {DRAWS}",  # a %= DRAWS
        f"53 0 1 {dropped}",  # below `dropped`: skip a line
        "6 0 0 4294967295",  # let it pass
        "6 0 0 2",  # drop it
    )
    return ",".join((str(len(lines)), *lines))


class Network:
    """A context manager: inside, this process is on one host, and `there` is the other."""

    def __enter__(self) -> Self:
        """Make both. Raises as `require_network`; AccessDenied where the kernel refuses."""
        require_network()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            why = os.strerror(ctypes.get_errno())
            raise AccessDenied(f"the kernel makes no network namespace here: {why}")
        self._holder = subprocess.Popen(others("unshare", "--net", "sleep", "infinity"))
        try:
            own, other = Path("/proc/self/ns/net"), Path(self._other)
            until("the other host", lambda: own.readlink() != other.readlink(), START_S)
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the other host. This process stays in its namespace."""
        self._holder.kill()
        self._holder.wait()

    def there(self, command: list[str]) -> list[str]:
        """The command that runs one on the other host."""
        return ["nsenter", f"--net={self._other}", "--", *command]

    def lose(self, fraction: float) -> None:
        """From now on drop one packet in so many, in both directions of both links."""
        for rail in RAILS:
            for there, link in ((False, f"near{rail}"), (True, f"far{rail}")):
                self._run("tc", "qdisc", "add", "dev", link, "clsact", there=there)
                self._run(
                    "tc", "filter", "add", "dev", link, "egress", "bpf", "da", "bytecode",
                    loss_program(fraction), there=there,
                )  # fmt: skip

    def heal(self) -> int:
        """Drop none any more; how many were dropped."""
        lost = 0
        for rail in RAILS:
            for there, link in ((False, f"near{rail}"), (True, f"far{rail}")):
                shown = self._run("tc", "-j", "-s", "qdisc", "show", "dev", link, there=there)
                lost += sum(each["drops"] for each in json.loads(shown))
                self._run("tc", "qdisc", "del", "dev", link, "clsact", there=there)
        return lost

    def cut(self, rail: int) -> None:
        """A link goes: what is sent over it is not answered."""
        self._run("ip", "link", "set", f"near{rail}", "down")

    def mend(self, rail: int) -> None:
        """It is there again."""
        self._run("ip", "link", "set", f"near{rail}", "up")

    @property
    def _other(self) -> str:
        return f"/proc/{self._holder.pid}/ns/net"

    def _connect(self) -> None:
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "set", "lo", "up", there=True)
        for rail in RAILS:
            peer = ("peer", "name", f"far{rail}", "netns", str(self._holder.pid))
            self._run("ip", "link", "add", f"near{rail}", "type", "veth", *peer)
            for there, link, where in (
                (False, f"near{rail}", near(rail)), (True, f"far{rail}", far(rail)),
            ):  # fmt: skip
                # A packet of a wire, not the 64 KiB that a kernel hands itself.
                self._run("ip", "link", "set", link, "gso_max_segs", "1", there=there)
                self._run("ip", "addr", "add", f"{where}/24", "dev", link, there=there)
                self._run("ip", "link", "set", link, "up", there=there)

    def _run(self, *command: str, there: bool = False) -> str:
        """ConfigError with what the tool said where it fails."""
        given = self.there(list(command)) if there else list(command)
        done = subprocess.run(given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
