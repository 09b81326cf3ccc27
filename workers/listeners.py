"""The sockets on which clients reach a worker's data, and a thread for each connection.

Owns accepting, greeting, the bound on sessions, and their end. What requests mean is
`workers.data_session`'s business.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import KVStoreError
from kvstore.rpc.address import UnixAddress, bound_address, parse_address
from kvstore.rpc.dialling import accept
from workers.data_session import DataSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.rpc.identity import ListenerIdentity
    from workers.service import Service

LOG: Final = logging.getLogger(__name__)
ACCEPT_PAUSE_S: Final = 0.05
"""Between two tries to accept where the system is out of something."""


class Listeners:
    """Listening sockets of one worker and the sessions that came through them."""

    def __init__(
        self, service: Service, identity: ListenerIdentity, sockets: Sequence[socket.socket]
    ) -> None:
        """Accept on these bound sockets once `start` is called; they stay the caller's to close."""
        self._service = service
        self._identity = identity
        self._sockets = sockets
        self._threads: list[threading.Thread] = []
        self._mutex = threading.Lock()
        self._sessions: dict[DataSession, threading.Thread] = {}
        self._greeting: set[socket.socket] = set()
        self._closing = threading.Event()

    @property
    def sessions(self) -> int:
        """Open data connections."""
        return len(self._sessions)

    def start(self) -> None:
        """Begin to serve."""
        for sock in self._sockets:
            thread = threading.Thread(target=self._accept, args=(sock,), name="worker-accept")
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop listening, end every connection, and wait for their threads."""
        with self._mutex:
            self._closing.set()
            greeting = list(self._greeting)
        for sock in self._sockets:
            where = parse_address(bound_address(sock))
            if isinstance(where, UnixAddress):
                # Before the socket closes, so that no successor can have bound the path by now.
                with suppress(FileNotFoundError):
                    os.unlink(where.path)
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for each in greeting:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        with self._mutex:
            sessions = dict(self._sessions)
        for session in sessions:
            session.end()
        self._service.pulls.cancel_all()
        if self._service.staging is not None:
            self._service.staging.end_waits()
        for thread in sessions.values():
            thread.join()

    def _accept(self, listening: socket.socket) -> None:
        try:
            self._accept_all(listening)
        except Exception as error:  # nobody would be let in from now on, and nobody hear why
            self._service.broken(error)

    def _accept_all(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError as error:
                # Out of descriptors, a dialler that gave up already, or the end.
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                LOG.warning("a connection was not accepted: %s", error)
                continue
            with self._mutex:
                busy = len(self._sessions) + len(self._greeting)
                is_full = self._closing.is_set() or busy >= limits.SESSIONS_MAX
                if not is_full:
                    self._greeting.add(sock)
            if is_full or not self._begin(sock):
                sock.close()

    def _begin(self, sock: socket.socket) -> bool:
        """Whether a thread serves it from here on."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="worker-data")
        try:
            thread.start()
        except RuntimeError as error:  # how Python says that the system gives no more threads
            LOG.warning("a connection was not served: %s", error)
            with self._mutex:
                self._greeting.discard(sock)
            return False
        return True

    def _serve(self, sock: socket.socket) -> None:
        session: DataSession | None = None
        try:
            session = self._greet(sock)
            if session is not None:
                session.serve()
        except KVStoreError as error:
            LOG.info("a data connection was refused: %s", error)
        except OSError as error:
            LOG.warning("a data connection ends, since the system refused: %s", error)
        except Exception as error:  # pulls and extents of it may wait for ever
            self._service.broken(error)
        finally:
            with self._mutex:
                self._greeting.discard(sock)
                if session is not None:
                    del self._sessions[session]

    def _greet(self, sock: socket.socket) -> DataSession | None:
        """The session of an accepted socket; None when the worker is stopping."""
        service, is_unix = self._service, sock.family == socket.AF_UNIX
        deadline_s = time.monotonic() + limits.HELLO_TIMEOUT_S
        link, hello = accept(sock, self._identity, deadline_s)
        number = service.next_number()
        client = hello.role, hello.tenant, hello.session
        session = DataSession(service, link, number, client, is_unix=is_unix)
        with self._mutex:
            self._greeting.discard(sock)
            if self._closing.is_set():
                link.close()
                return None
            self._sessions[session] = threading.current_thread()
        return session
