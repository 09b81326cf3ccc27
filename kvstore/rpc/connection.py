"""A blocking, thread-safe, pipelined connection: requests out, replies back by id.

One reader: the calling thread that finds no reader reads the socket itself, hands
replies of other calls to their threads, and passes the reading on when it has its own. There is
no reader thread, because waking one costs more than the whole call. One thread at a time sends,
one at a time reads; the mutex guards who reads and who sleeps, and is never held across a wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, KVStoreError, MalformedMessage, OutOfSpace, Unavailable
from kvstore.rpc.dialling import dial
from kvstore.rpc.failure import error_of
from kvstore.wire.framing import REPLY, REQUEST, Frame, pack_frame
from kvstore.wire.messages.hello import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Welcome

SPIN_S: Final = 50e-6
"""How long a reader polls before it sleeps: about what being woken costs.

Measured on two cores over a Unix socket: where the peer runs on the other core a probe takes 26
instead of 47 us, for the same processor time here and a quarter less at the peer, which then has
nobody to wake. Where both share one core it takes 18 us either way, and the spins in vain until
FrameSocket gives them up cost 1 to 4 us of processor time a call.
"""


class _Call:
    """One request in flight: its reply once that has come, and how to wake who waits for it."""

    __slots__ = ("reads", "reply", "wake")

    def __init__(self) -> None:
        self.reply: Message | None = None
        self.wake: threading.Lock | None = None
        """Held while its caller sleeps; whoever releases it has set `reply`, or `reads`."""
        self.reads = False


class Connection:
    """Calls over one FrameSocket. Once broken it stays so, and every call raises the reason."""

    def __init__(self, link: FrameSocket, welcome: Welcome) -> None:
        """Own `link`, on which the peer has answered Welcome."""
        link.spin_s = SPIN_S
        link.takes_fds = False
        self.epoch: Final = welcome.epoch
        self._link = link
        self._version = welcome.version
        self._ids = itertools.count(1)
        self._mutex = threading.Lock()
        self._send_turn = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._is_read = False
        self._broken: str | None = None
        """Why no call can be made any more."""

    @classmethod
    def open(cls, address: str, identity: Identity, timeout_s: float) -> Connection:
        """Dial `address`. Raises what kvstore.rpc.dialling.dial raises."""
        return cls(*dial(address, identity, time.monotonic() + timeout_s))

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: not closed, not broken, not inherited through a fork."""
        return self._broken is None and self._link.fileno() >= 0

    @property
    def is_cut_off(self) -> bool:
        """Whether the way to the peer seems to have gone, as far as the kernel can tell."""
        return self._link.is_cut_off

    @property
    def in_flight(self) -> int:
        """Requests started and not yet finished."""
        return len(self._calls)

    def call(
        self, message: Message, timeout_s: float, on_silence: Callable[[], None] | None = None
    ) -> Message:
        """The peer's reply to `message`, within `timeout_s`.

        A Failure is raised as the error it names. DeadlineExceeded leaves the connection usable;
        Unavailable means it broke, or the peer said so (see `is_open`). `on_silence` is run after
        each limits.CALL_PATIENCE_S without a reply; it may close the connection.
        """
        request_id = self.start(message, timeout_s)
        if on_silence is not None and timeout_s > limits.CALL_PATIENCE_S:
            deadline_s = time.monotonic() + timeout_s
            self._watch(request_id, deadline_s - limits.CALL_PATIENCE_S, on_silence)
            timeout_s = deadline_s - time.monotonic()
        return self.finish(request_id, timeout_s)

    def start(self, message: Message, timeout_s: float = limits.CALL_TIMEOUT_S) -> int:
        """Send a request and return its id, for exactly one `finish`.

        `timeout_s` bounds the sending. OutOfSpace at limits.REQUESTS_IN_FLIGHT_MAX.
        """
        request_id = next(self._ids)
        frame = pack_frame(REQUEST, request_id, message, self._version)
        if len(self._calls) >= limits.REQUESTS_IN_FLIGHT_MAX:
            raise OutOfSpace(f"{len(self._calls)} requests are in flight on one connection")
        deadline_s = time.monotonic() + timeout_s
        turn = self._send_turn
        # Acquiring with a timeout takes six times as long, so it comes second.
        if not (turn.acquire(False) or turn.acquire(timeout=max(0.0, timeout_s))):
            raise DeadlineExceeded("the peer does not take what is sent to it")
        failure: BaseException | None = None
        try:
            if self._broken is not None:
                raise self._again()
            self._calls[request_id] = _Call()
            self._link.send_packed(frame, deadline_s)
        except BaseException as error:
            failure = error
            raise
        finally:
            turn.release()
            if failure is not None:
                # A part of the frame may have gone out: nothing can follow it.
                self._calls.pop(request_id, None)
                self._break(failure)
            elif self._broken is not None:
                self._close_if_idle()
        return request_id

    def finish(self, request_id: int, timeout_s: float) -> Message:
        """The reply to a started request. Raises as `call` does."""
        call = self._calls[request_id]
        try:
            self._await(request_id, call, time.monotonic() + timeout_s)
        finally:
            del self._calls[request_id]
        reply = call.reply
        if reply is None:
            raise self._again()
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def close(self) -> None:
        """End the connection; calls in flight raise Unavailable. May be repeated."""
        self._break(Unavailable("this side closed the connection"))

    def _watch(self, request_id: int, until_s: float, on_silence: Callable[[], None]) -> None:
        """Wait for the reply, which `finish` takes, and tell each time that it is late."""
        call = self._calls[request_id]
        try:
            while (now_s := time.monotonic()) < until_s:
                try:
                    self._await(request_id, call, now_s + limits.CALL_PATIENCE_S)
                except DeadlineExceeded:
                    on_silence()
                else:
                    return
        except BaseException:
            del self._calls[request_id]
            raise

    def _await(self, request_id: int, call: _Call, deadline_s: float) -> None:
        """Until the reply is there or the connection is broken, else DeadlineExceeded."""
        if self._becomes_reader(call):
            self._read(request_id, call, deadline_s)
        else:
            self._sleep(request_id, call, deadline_s)

    def _becomes_reader(self, call: _Call) -> bool:
        """Whether the caller is to read the socket now. If not it must `_sleep`."""
        with self._mutex:
            call.reads = False
            if call.reply is not None or self._broken is not None:
                return False
            if self._is_read:
                call.wake = threading.Lock()
                call.wake.acquire()
                return False
            self._is_read = True
            return True

    def _sleep(self, request_id: int, call: _Call, deadline_s: float) -> None:
        """Sleep until the reply is there, or reading is passed on to this call."""
        wake = call.wake
        try:
            if wake is not None and not wake.acquire(
                timeout=max(0.0, deadline_s - time.monotonic())
            ):
                self._give_up(call)
        except BaseException:
            if call.reads:
                self._pass_on()
            raise
        if call.reads:
            self._read(request_id, call, deadline_s)

    def _give_up(self, call: _Call) -> None:
        """Stop sleeping; DeadlineExceeded unless there was a reason to wake up after all."""
        with self._mutex:
            call.wake = None
            if not call.reads and call.reply is None and self._broken is None:
                raise DeadlineExceeded("no answer within the deadline")

    def _read(self, request_id: int, call: _Call, deadline_s: float) -> None:
        """Read until the own reply is there, handing others theirs; then pass the reading on."""
        receive = self._link.receive
        try:
            while call.reply is None:
                frame = receive(deadline_s)
                if frame.request_id == request_id and frame.kind is REPLY:
                    call.reply = frame.message
                else:
                    self._hand_over(frame)
        except DeadlineExceeded:
            raise
        except KVStoreError as error:
            self._break(error)
        except BaseException as error:
            # Interrupted between two steps of receiving: the position may be lost.
            self._break(error)
            raise
        finally:
            self._pass_on()

    def _hand_over(self, frame: Frame) -> None:
        if frame.kind is not REPLY:
            raise MalformedMessage(f"{type(frame.message).__name__} as a request to a client")
        with self._mutex:
            call = self._calls.get(frame.request_id)
            # No such call: its deadline passed before the reply came.
            if call is not None:
                call.reply = frame.message
                _wake(call)

    def _pass_on(self) -> None:
        """Make a sleeper the reader; without any, whoever finishes next is it."""
        with self._mutex:
            self._is_read = False
            if self._broken is None:
                for call in list(self._calls.values()):
                    if call.wake is not None:
                        self._is_read = call.reads = True
                        _wake(call)
                        return
                return
        self._close_if_idle()

    def _break(self, error: BaseException) -> None:
        """Fail every call, now and later. The first reason stays."""
        with self._mutex:
            if self._broken is None:
                self._broken = str(error) or type(error).__name__
            for call in list(self._calls.values()):
                _wake(call)
        self._link.shutdown()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Free the descriptor of a broken connection once no thread can be using it."""
        # Whoever sends now fails at once, since the socket was shut down.
        with self._send_turn, self._mutex:
            if not self._is_read:
                self._link.close()

    def _again(self) -> Unavailable:
        """A fresh error with the reason, for this thread to raise."""
        return Unavailable(self._broken)


def _wake(call: _Call) -> None:
    """Let its caller run, if that sleeps. The mutex is held."""
    if call.wake is not None:
        call.wake.release()
        call.wake = None
