"""Runs inference workers and a gateway beside a pool, each to be killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvstore import KVStore
from kvstore.announcement import read_announcement
from kvstore.client.tickets import list_tickets
from kvstore.config import read_secret
from tests.cluster.forked import mother
from tests.cluster.servers import die_with_parent, until
from tests.cluster.up import Up, clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from kvstore.wire.messages.tickets import TicketList
    from tests.cluster.forked import Forked

WAIT_S: Final = 120.0


class Fleet:
    """A pool, inference workers of the tiny model, and a gateway."""

    def __init__(
        self,
        folder: Path,
        *roles: str,
        options: tuple[str, ...] = (),
        secret: Path | None = None,
        config: str = "",
    ) -> None:
        """Remember what to start: a worker for each of `roles`, named after it and its place.

        `config` is the pool's, as a file has it.
        """
        self.folder = folder
        self._roles = roles
        self._options = options
        self._file = secret
        self._config = config
        self._secret = [] if secret is None else [f"--secret-file={secret}"]
        self.processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Start everything; returns when the gateway listens."""
        with ExitStack() as undo:
            own = [*self._secret]
            if self._config:
                (self.folder / "pool.toml").write_text(self._config)
                own.append(f"--config={self.folder / 'pool.toml'}")
            self.up = undo.enter_context(Up(self.folder / "pool", *own, dram="256MiB"))
            key = None if self._file is None else read_secret(self._file)
            self.store = undo.enter_context(KVStore.connect(self.up.master, secret=key))
            undo.callback(self._stop_all)
            for number, role in enumerate(self._roles):
                self.start(f"{role}-{number}", role)
            self.gateway = self.start_gateway("gateway")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._undo.close()

    def start(self, name: str, role: str) -> None:
        """Start an inference worker; `where` waits for it."""
        own = [f"--role={role}", f"--name={name}", "--model=tiny", "--threads=1"]
        given = [*self._shared(), *own, *self._options]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = mother().start("workers.serve", given, log)

    def start_gateway(self, name: str, *options: str) -> str:
        """Start one for the workers that run: where it listens, once it does."""
        workers = [each for each in self.processes if each.partition("-")[0] in self._roles]
        named = [f"--worker={self.where(each)}" for each in workers]
        self._run(name, "workers.gateway", "--listen=127.0.0.1:0", *named, *options)
        return self.where(name, "gateway")

    def where(self, name: str, announced: str = "") -> str:
        """The address of a part, once it listens; it is announced by its name, or as that."""
        pid = self.processes[name].pid

        def listens() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            found = read_announcement(self.folder, announced or name)
            return found is not None and found.pid == pid

        until(f"{name} listens", listens, WAIT_S)
        found = read_announcement(self.folder, announced or name)
        assert found is not None
        return found.listen

    def log(self, name: str) -> str:
        """What a part has said."""
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a part a signal, and wait for its end."""
        self.processes[name].send_signal(number)
        self.processes[name].wait(WAIT_S)

    def tickets(self) -> TicketList:
        """What the master knows."""
        return self.store.carry_out(list_tickets())

    def await_idle(self) -> None:
        """Until no ticket, credit, slot, staged byte or pin is left."""
        until("everything is given back", self._is_idle, WAIT_S)

    def _is_idle(self) -> bool:
        found = self.tickets()
        used = sum(row.used_tokens + row.running + row.queued_tokens for row in found.workers)
        return not (found.tickets or found.staging_bytes or used or self.store.pins())

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Post to the gateway; status and answer."""
        with Asked(self.gateway, path, body, headers) as asked:
            return asked.response.status, json.loads(asked.response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Asked:
        """Post to the gateway for a stream of events."""
        return Asked(self.gateway, path, {**body, "stream": True}, {})

    def _run(self, name: str, module: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *self._shared(), *options],
                env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def _shared(self) -> list[str]:
        return [f"--master={self.up.master}", f"--data-dir={self.folder}", *self._secret]

    def _stop_all(self) -> None:
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.kill()
            process.wait()


class Asked:
    """One question to a gateway; leaving its block hangs up."""

    def __init__(
        self, where: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """Ask; `response` waits for the answer's beginning."""
        self._connection = http.client.HTTPConnection(where, timeout=WAIT_S)
        self._connection.request("POST", path, json.dumps(body), headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @cached_property
    def response(self) -> http.client.HTTPResponse:
        """Status, headers and body."""
        return self._connection.getresponse()

    def events(self) -> Iterator[dict[str, Any]]:
        """The stream's events, up to the one that says that it is done."""
        assert self.response.status == 200, self.response.read()
        for line in self.response:
            if line.startswith(b"data: "):
                if line.strip() == b"data: [DONE]":
                    return
                yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream ended without [DONE]")

    def pieces(self) -> Iterator[str]:
        """The text of a completion as it comes."""
        for event in self.events():
            assert "error" not in event, event
            yield from (choice["text"] for choice in event["choices"])


def secret_file(folder: Path) -> Path:
    """A fresh cluster secret."""
    path = folder / "secret"
    path.write_text(os.urandom(32).hex())
    path.chmod(0o600)
    return path
