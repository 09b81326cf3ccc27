"""Frames, raw bytes and descriptors over one connected socket, blocking, with deadlines.

Used by `Connection` and by both ends of the data plane. One thread may send while another
receives; neither side is for several threads at once. A deadline is a `time.monotonic()` moment.
The socket itself never blocks: waiting is a poll, so that the two directions share no timeout.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
import weakref
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, MalformedMessage, Unavailable
from kvstore.rpc.address import is_cut_off
from kvstore.wire.framing import GREETING_VERSION, Frame, FrameKind, FrameReader, pack_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import NoReturn

    from kvstore.wire.messages.base import Message

_IOVECS_MAX: Final = 512
"""Well below IOV_MAX (1024), and enough to make the system call's own cost vanish."""
_FDS_PER_MESSAGE_MAX: Final = 253
"""SCM_MAX_FD of the kernel."""
_FDS_SPACE: Final = socket.CMSG_SPACE(_FDS_PER_MESSAGE_MAX * 4)
_CTRUNC: Final = int(socket.MSG_CTRUNC)
_CMSG_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
"""As plain numbers: the enum's own operators cost as much as a system call."""

_SPINS_IN_VAIN_MAX: Final = 8
"""At most 256 waits go by until spinning is tried again."""

_OPEN: Final[weakref.WeakSet[FrameSocket]] = weakref.WeakSet()


class FrameSocket:
    """One end of a connection. Every failure of the socket is `Unavailable`, an end of stream too.

    After anything but DeadlineExceeded from `receive` the stream's position is lost: close it.
    A forked child holds no copy of it: there, every use raises Unavailable.
    """

    __slots__ = ("__weakref__", "_fds", "_pid", "_poll_in", "_poll_out", "_reader", "_sock",
                 "_spins_in_vain", "_waits_without_spin", "spin_s", "takes_fds")  # fmt: skip

    def __init__(self, sock: socket.socket, version: int = GREETING_VERSION) -> None:
        """Own the connected socket `sock`. Frames of `version` until `set_version`."""
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader(version)
        self.takes_fds = sock.family == socket.AF_UNIX
        """Whether descriptors may come. Who expects none clears it: looking for them takes a
        microsecond, and the kernel drops those that nobody takes."""
        self._fds: list[int] = []
        self._poll_in = select.poll()
        self._poll_in.register(sock, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(sock, select.POLLOUT)
        self._pid = os.getpid()
        self.spin_s = 0.0
        """How long `receive` polls without sleeping: waking a sleeping thread costs more."""
        self._spins_in_vain = 0
        self._waits_without_spin = 0
        _OPEN.add(self)

    @property
    def version(self) -> int:
        """The protocol version that both ends use now."""
        return self._reader.version

    def set_version(self, version: int, frame_bytes_max: int = limits.FRAME_BYTES_MAX) -> None:
        """Speak `version` from the next frame on, with frames of at most `frame_bytes_max`."""
        self._reader.version = version
        self._reader.frame_bytes_max = frame_bytes_max

    def fileno(self) -> int:
        """The descriptor, e.g. for SO_PEERCRED; -1 once closed."""
        return self._sock.fileno()

    @property
    def is_cut_off(self) -> bool:
        """Whether nobody at the other end confirms what is sent."""
        return is_cut_off(self._sock)

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and the peer has neither ended it nor sent anything."""
        return (
            self._sock.fileno() >= 0
            and not self._reader.buffered_bytes
            and not self._poll_in.poll(0)
        )

    # Sending.

    def send(
        self,
        kind: FrameKind,
        request_id: int,
        message: Message,
        fds: Sequence[int] = (),
        raw: Sequence[bytes | bytearray | memoryview] = (),
        deadline_s: float | None = None,
    ) -> None:
        """Send one frame, descriptors with it (Unix sockets only), and raw bytes after it.

        Without a deadline it fails once the peer has taken nothing for limits.SEND_STALL_MAX_S.
        A send that raises may have sent a part: close the connection.
        """
        frame = pack_frame(kind, request_id, message, self._reader.version)
        if fds:
            # Elsewhere the kernel would drop them without a word.
            assert self._sock.family == socket.AF_UNIX, "descriptors travel over Unix sockets only"
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._send_views([memoryview(frame), *_byte_views(raw)], deadline_s, [rights])
        elif raw:
            self._send_views([memoryview(frame), *_byte_views(raw)], deadline_s, [])
        else:
            self.send_packed(frame, deadline_s)

    def send_raw(self, raw: Sequence[memoryview]) -> None:
        """Send more raw bytes after those of the last frame; see `send`."""
        self._send_views(_byte_views(raw), None, [])

    def send_packed(self, frame: bytes, deadline_s: float | None = None) -> None:
        """Send a packed frame (`pack_frame` in this connection's version)."""
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            _lost(error)
        if sent != len(frame):
            self._send_views([memoryview(frame)[sent:]], deadline_s, [])

    def _send_views(
        self,
        views: list[memoryview],
        deadline_s: float | None,
        rights: list[tuple[int, int, array.array[int]]],
    ) -> None:
        first = 0
        while first < len(views):
            try:
                sent = self._sock.sendmsg(views[first : first + _IOVECS_MAX], rights)
            except BlockingIOError:
                self._wait_writable(deadline_s)
                continue
            except OSError as error:
                _lost(error)
            rights = []  # They travel with the first byte.
            first = _advance(views, first, sent)

    def _wait_writable(self, deadline_s: float | None) -> None:
        now = time.monotonic()
        until = now + limits.SEND_STALL_MAX_S if deadline_s is None else deadline_s
        if not self._poll_out.poll(max(0.0, until - now) * 1000):
            raise DeadlineExceeded("the peer does not take what is sent to it")

    # Receiving.

    def receive(self, deadline_s: float | None = None) -> Frame:
        """The next frame. DeadlineExceeded loses nothing: the next call goes on where it stopped.

        MalformedMessage when the peer does not keep to the protocol.
        """
        reader = self._reader
        while (frame := reader.next_frame()) is None:
            self._wait_readable(deadline_s)
            reader.received(self._receive_some(reader.space()))
        return frame

    def receive_ready(self) -> Frame | None:
        """The next frame if all of it has come, else None: `receive` without waiting."""
        reader = self._reader
        while (frame := reader.next_frame()) is None:
            if not self._poll_in.poll(0):
                return None
            reader.received(self._receive_some(reader.space()))
        return frame

    def receive_raw_into(
        self,
        views: Sequence[bytearray | memoryview],
        deadline_s: float | None = None,
        stall_s: float = limits.SEND_STALL_MAX_S,
    ) -> None:
        """Fill `views`, in order, with the raw bytes that follow the last frame received.

        It fails at the deadline, and once the peer has sent nothing for `stall_s`.
        A call that raises leaves the stream in the middle of the raw bytes: close the connection.
        """
        rest = _byte_views(views)
        first = 0
        while first < len(rest) and self._reader.buffered_bytes:
            first = _advance(rest, first, self._reader.take_raw(rest[first]))
        while first < len(rest):
            try:
                got = self._sock.recvmsg_into(rest[first : first + _IOVECS_MAX])[0]
            except BlockingIOError:
                stalled_s = time.monotonic() + stall_s
                self._wait_readable(min(stalled_s, deadline_s or stalled_s))
                continue
            except OSError as error:
                _lost(error)
            if not got:
                raise Unavailable("the peer closed the connection in mid-transfer")
            first = _advance(rest, first, got)

    def take_fds(self, count: int) -> list[int]:
        """The first `count` descriptors that came and were not taken: now the caller's to close.

        MalformedMessage when fewer came. Descriptors arrive no later than the frame they were
        sent with, and in order.
        """
        if len(self._fds) < count:
            raise MalformedMessage(f"{len(self._fds)} descriptors came, want {count}")
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def _receive_some(self, space: memoryview) -> int:
        """Bytes received into `space`; 0 when there are none after all."""
        try:
            got = self._receive_with_fds(space) if self.takes_fds else self._sock.recv_into(space)
        except BlockingIOError:
            return 0
        except OSError as error:
            _lost(error)
        if not got:
            raise Unavailable("the peer closed the connection")
        return got

    def _receive_with_fds(self, space: memoryview) -> int:
        got, ancillary, flags, _ = self._sock.recvmsg_into([space], _FDS_SPACE, _CMSG_CLOEXEC)
        if ancillary or flags & _CTRUNC:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self._fds.extend(array.array("i", data[: len(data) // 4 * 4]))
            if flags & _CTRUNC or len(self._fds) > limits.DESCRIPTORS_WAITING_MAX:
                raise MalformedMessage("too many descriptors from the peer")
        return got

    def _wait_readable(self, deadline_s: float | None) -> None:
        if self.spin_s and self._spin():
            return
        if deadline_s is None:
            self._poll_in.poll()
        elif not self._poll_in.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise DeadlineExceeded("no answer within the deadline")

    def _spin(self) -> bool:
        """Poll for up to `spin_s` where that has paid lately; whether there is something now.

        After each spin in vain twice as many waits go without: on a busy host a spin only takes
        the processor from the peer that is waited for.
        """
        if self._waits_without_spin:
            self._waits_without_spin -= 1
            return False
        poll, clock = self._poll_in.poll, time.monotonic
        until = clock() + self.spin_s
        while clock() < until:
            if poll(0):
                self._spins_in_vain = 0
                return True
        self._spins_in_vain = min(self._spins_in_vain + 1, _SPINS_IN_VAIN_MAX)
        self._waits_without_spin = 1 << self._spins_in_vain
        return False

    # Ending.

    def shutdown(self) -> None:
        """End the connection for both sides and wake this side's threads; any thread may call it.

        The descriptor stays until `close`, which is for the last thread that uses it.
        """
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free everything that it holds. May be repeated."""
        self.shutdown()
        self._release()

    def _release(self) -> None:
        """Close this process's copies; a shutdown would end the connection of the parent too."""
        self._sock.close()
        _OPEN.discard(self)
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def _lost(error: OSError) -> NoReturn:
    raise Unavailable(f"connection lost: {error.strerror or error}") from error


def _byte_views(buffers: Iterable[bytes | bytearray | memoryview]) -> list[memoryview]:
    return [view for buffer in buffers if (view := memoryview(buffer).cast("B"))]


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Drop `count` bytes from the front of `views[first:]`; the new first."""
    while count:
        size = len(views[first])
        if count < size:
            views[first] = views[first][count:]
            break
        count -= size
        first += 1
    return first


def _forget_inherited() -> None:
    for each in list(_OPEN):
        each._release()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_forget_inherited)
