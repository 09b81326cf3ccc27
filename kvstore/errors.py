"""What callers catch, arranged by what they can do about it.

A miss is not an error: lookups and reads return `Miss`. Everything here is raised only when a
call could not be carried out. Each class has a stable `code` that travels on the wire.
"""

from __future__ import annotations

from typing import ClassVar


class KVStoreError(Exception):
    """Root of every error that kvharbor raises on purpose."""

    code: ClassVar[str] = "error"
    retry_after_s: float = 0.0
    """How long to wait before trying again, where the peer said so; 0 where it did not."""


class Unavailable(KVStoreError):
    """A master or worker cannot be reached or is not ready: retry, within your deadline."""

    code = "unavailable"


class DeadlineExceeded(Unavailable):
    """The call's deadline passed; its effect is unknown and retrying it is safe."""

    code = "deadline_exceeded"


class OutOfSpace(KVStoreError):
    """The pool or a bounded table is full for now: back off."""

    code = "out_of_space"


class Throttled(KVStoreError):
    """Admission: the request cannot begin now. Nothing is held; ask again after retry_after_s."""

    code = "throttled"
    reason: str = ""
    """decode_occupancy, ttft, staging, migration, no_prefill or no_decode."""

    def __init__(self, retry_after_s: float, reason: str, text: str) -> None:
        """Say when to ask again, and what is short."""
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.reason = reason


class StaleEpoch(KVStoreError):
    """A higher epoch is known: find the current master again."""

    code = "stale_epoch"


class NotLeader(StaleEpoch):
    """This master does not lead: ask the one that does, at one of `where`."""

    code = "not_leader"
    where: tuple[str, ...] = ()
    """Addresses of the leader, in the order to try them in; empty where it is not known."""

    def __init__(self, where: tuple[str, ...] = ()) -> None:
        """Name the leader's addresses, as far as they are known."""
        known = f"the leader is at {', '.join(where)}" if where else "nor does it know who does"
        super().__init__(f"this master does not lead; {known}")
        self.where = where


class Fenced(KVStoreError):
    """The worker has fenced itself, or the extent's generation was fenced: plan again."""

    code = "fenced"


class CallerError(KVStoreError):
    """The request itself is wrong: fix the caller, retrying cannot help."""

    code = "caller_error"


class BadValue(CallerError, ValueError):
    """A field has a value that is never right."""

    code = "bad_value"
    field: str = ""
    """Empty where a peer has said it: the text names it then, too."""

    def __init__(self, field: str, value: object, want: str) -> None:
        """Name the field, the value that came and what would be right."""
        text = repr(value)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        super().__init__(f"{field}: got {shown}, want {want}")
        self.field = field


class LayoutMismatch(CallerError):
    """Sizes differ from what the namespace's layout gives by arithmetic."""

    code = "layout_mismatch"


class UnknownNamespace(CallerError):
    """The namespace was not opened at this master."""

    code = "unknown_namespace"


class UnknownTicket(CallerError):
    """This master knows no such ticket: it has ended, or has to be presented to a new master."""

    code = "unknown_ticket"


class AccessDenied(CallerError):
    """The peer's proof, role or tenant does not allow this."""

    code = "access_denied"


class VersionMismatch(CallerError):
    """The peers' protocol version ranges do not meet; the text names both."""

    code = "version_mismatch"


class ConfigError(CallerError):
    """A configuration stops the start: the text names file, key, value and what would do."""

    code = "config_error"


class BufferClosed(CallerError):
    """The buffer was closed, or belongs to another store or process."""

    code = "buffer_closed"


class MalformedMessage(KVStoreError):
    """Bytes from a peer are not a message of this protocol: the connection is closed."""

    code = "malformed_message"


class CorruptPage(KVStoreError):
    """Stored bytes failed verification. Clients see a miss; this is for logs and workers."""

    code = "corrupt_page"


class SegmentInUse(KVStoreError):
    """Another process owns this segment file."""

    code = "segment_in_use"


class InvariantBroken(KVStoreError):
    """Our own bug: a numbered invariant does not hold. Carries the story of what led to it."""

    code = "invariant_broken"


class IllegalTransition(InvariantBroken):
    """A state machine met an event that its table does not list."""

    code = "illegal_transition"

    def __init__(self, subject: str, state: object, event: object, story: str = "") -> None:
        """Name the subject, its state, the event, and its recent history."""
        super().__init__(f"{subject}: {event} in state {state}{': ' if story else ''}{story}")


def _subclasses(root: type[KVStoreError]) -> list[type[KVStoreError]]:
    found = [root]
    for child in root.__subclasses__():
        found.extend(_subclasses(child))
    return found


_BY_CODE: dict[str, type[KVStoreError]] = {cls.code: cls for cls in _subclasses(KVStoreError)}


def error_from_wire(code: str, text: str) -> KVStoreError:
    """Rebuild a peer's error; an unknown code (a newer peer's) becomes the root class."""
    cls = _BY_CODE.get(code, KVStoreError)
    error = cls.__new__(cls)
    Exception.__init__(error, text)
    return error
