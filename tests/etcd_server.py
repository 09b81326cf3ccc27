"""Real etcd for tests and benchmarks: one member or three on loopback, with every trouble at hand.

Owns the processes and their certificates. Talks to them by etcd's JSON pages, so that what a test
checks is not seen through the adapter under test.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.etcd_certificates import Certificates
from tests.processes import stop
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from typing import Self

START_S: Final = 20.0
ASK_S: Final = 5.0
PAUSE_S: Final = 0.02


def etcd_program() -> str:
    """Where etcd is; its absence fails the test that asks, since nothing may be skipped unseen."""
    own = Path(sys.prefix) / "bin" / "etcd"
    found = str(own) if own.exists() else shutil.which("etcd")
    assert found, "the program etcd is missing: run `make etcd-server`"
    return found


class EtcdOptions(msgspec.Struct, frozen=True):
    """What every member is started with."""

    tls: Certificates | None = None
    """Clients come with TLS, and with a certificate of theirs."""
    quota_bytes: int = 0
    """Beyond it etcd takes no more values; 0: 2 GiB."""
    election_ms: int = 1000
    """The least lease is one and a half times this, in whole seconds."""


class EtcdMember:
    """One process, from start to start."""

    def __init__(self, name: str, folder: Path, options: EtcdOptions) -> None:
        """Take ports; nothing runs yet."""
        self.name = name
        self.port = free_port()
        self._peer_port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        """Where other members find it."""
        return f"http://127.0.0.1:{self._peer_port}"

    def start(self, cluster: str) -> None:
        """Start, or start again on what it had; `cluster` lists the members as etcd wants it."""
        assert self._process is None, "it runs"
        tls = self._options.tls
        url = f"{'https' if tls else 'http'}://{self.address}"
        command = [
            *("setpriv", "--pdeathsig", "KILL", etcd_program(), "--name", self.name),
            *("--data-dir", str(self._folder / self.name), "--initial-cluster", cluster),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--quota-backend-bytes", str(self._options.quota_bytes), "--bcrypt-cost", "4"),
            *("--election-timeout", str(self._options.election_ms)),
            *("--heartbeat-interval", str(self._options.election_ms // 10)),
        ]
        if tls:
            command += [
                *("--cert-file", str(tls.server.cert), "--key-file", str(tls.server.key)),
                *("--trusted-ca-file", str(tls.ca), "--client-cert-auth"),
            ]
        clean = {name: value for name, value in os.environ.items() if "ETCD" not in name}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=clean)

    def kill(self) -> None:
        """SIGKILL; nothing that it acknowledged may be lost by it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered once it returns."""
        stop(self._running().pid)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it does not run"
        return self._process

    def ask(self, path: str, **body: object) -> dict[str, Any]:
        """One call of the JSON form of etcd's interface: `kv/range`, `auth/enable`, …"""
        with ExitStack() as undo:
            context, scheme = None, "http"
            if (tls := self._options.tls) is not None:
                scheme, context = "https", ssl.create_default_context(cafile=tls.ca)
                context.load_cert_chain(tls.client.cert, tls.client.key)
            url = f"{scheme}://{self.address}/v3/{path}"
            request = urllib.request.Request(url, json.dumps(body).encode())
            try:
                answer = urllib.request.urlopen(request, timeout=ASK_S, context=context)
            except urllib.error.HTTPError as error:
                error.close()  # it is an answer, too, and has the connection
                raise
            undo.callback(answer.close)
            found: dict[str, Any] = json.load(answer)
        return found


class EtcdServers:
    """One cluster of one member or more: a context manager."""

    def __init__(self, folder: Path, members: int = 1, options: EtcdOptions | None = None) -> None:
        """Prepare; nothing runs yet. `folder` gets data and logs."""
        options = options or EtcdOptions()
        self.members = [EtcdMember(f"e{each}", folder, options) for each in range(members)]
        self._cluster = ",".join(f"{each.name}={each.peer_url}" for each in self.members)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all members, for clients."""
        return tuple(each.address for each in self.members)

    def __enter__(self) -> Self:
        for each in self.members:
            each.start(self._cluster)
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.members:
            each.kill()

    def restart(self, member: EtcdMember) -> None:
        """Start a member that was killed."""
        member.start(self._cluster)

    def wait_ready(self) -> None:
        """Until some member answers a linearizable read."""
        last: OSError | None = None
        for _ in range(int(START_S / PAUSE_S)):
            for each in self.members:
                try:
                    each.ask("kv/range", key=_text("ready?"))
                except urllib.error.HTTPError as error:
                    if error.code in (400, 401, 403):  # it has users, and asks who we are
                        return
                    last = error
                except OSError as error:
                    last = error
                else:
                    return
            time.sleep(PAUSE_S)
        raise AssertionError(f"etcd does not answer: {last}")

    def leader(self) -> EtcdMember:
        """The member that leads the others; none that is frozen may be asked."""
        for _ in range(int(START_S / PAUSE_S)):
            for each in self.members:
                try:
                    status = each.ask("maintenance/status")
                except OSError:
                    continue
                if status.get("leader") == status["header"]["member_id"]:
                    return each
            time.sleep(PAUSE_S)
        raise AssertionError("etcd has no leader")

    def put(self, key: str, value: str) -> None:
        """Write as a stranger would."""
        self.put_bytes(key.encode(), value.encode())

    def put_bytes(self, key: bytes, value: bytes) -> None:
        """As `put`."""
        self.members[0].ask("kv/put", key=_base64(key), value=_base64(value))

    def delete(self, key: str) -> None:
        """Delete one key."""
        self.members[0].ask("kv/deleterange", key=_text(key))

    def get(self, key: str) -> str | None:
        """Read one key."""
        found = self.members[0].ask("kv/range", key=_text(key)).get("kvs")
        return None if not found else base64.b64decode(found[0].get("value", "")).decode()

    def revision(self) -> int:
        """The present."""
        return int(self.members[0].ask("kv/range", key=_text("x"))["header"]["revision"])

    def has_revision(self, revision: int) -> bool:
        """Whether it was not compacted away."""
        try:
            self.members[0].ask("kv/range", key=_text("x"), revision=revision)
        except urllib.error.HTTPError:
            return False
        return True

    def compact(self) -> None:
        """Forget all but the present."""
        self.members[0].ask("kv/compaction", revision=self.revision(), physical=True)

    def clear_space(self) -> None:
        """What an operator does after the quota was reached: compact, defragment, disarm."""
        self.compact()
        for each in self.members:
            each.ask("maintenance/defragment")
        for alarm in self.members[0].ask("maintenance/alarm").get("alarms", []):
            self.members[0].ask("maintenance/alarm", action="DEACTIVATE", **alarm)

    def require_users(self, user: str, password: str, prefix: str) -> None:
        """Turn authentication on: root with the same password, and `user` within the prefix."""
        ask = self.members[0].ask
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        ask("auth/role/add", name="root")
        ask("auth/role/add", name="kvharbor")
        permission = {"permType": "READWRITE", "key": _text(prefix), "range_end": _text(end)}
        ask("auth/role/grant", name="kvharbor", perm=permission)
        for name, role in (("root", "root"), (user, "kvharbor")):
            ask("auth/user/add", name=name, password=password)
            ask("auth/user/grant", user=name, role=role)
        ask("auth/enable")


def _text(value: str) -> str:
    return _base64(value.encode())


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
