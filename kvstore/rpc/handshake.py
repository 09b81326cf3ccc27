"""The greeting as pure functions: what each side says, and what it refuses to hear.

Order: the listener's Challenge, the dialler's Hello, the listener's Welcome or Failure. Both sides
prove the cluster secret by HMAC-SHA256 over everything said, so neither proof can be replayed,
turned back at its maker, or used for another role, tenant, session or version range.
Frames, sockets and clocks are the callers'.
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, MalformedMessage, VersionMismatch
from kvstore.namespace import encode_fields
from kvstore.rpc.failure import error_of
from kvstore.rpc.identity import SESSION_BYTES, Identity, ListenerIdentity, Role, VersionRange
from kvstore.wire.framing import VERSION_LIMIT
from kvstore.wire.messages.hello import Challenge, Failure, Hello, Welcome

if TYPE_CHECKING:
    from kvstore.namespace import FieldValue
    from kvstore.wire.messages.base import Message

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
_DIALLER_TAG: Final = b"kvh1.hello"
_LISTENER_TAG: Final = b"kvh1.welcome"


def new_nonce() -> bytes:
    """Fresh bytes that make a proof good for one connection only."""
    return os.urandom(NONCE_BYTES)


def challenge(listener: ListenerIdentity, nonce: bytes) -> Challenge:
    """The listener's first words."""
    spoken = listener.versions
    return Challenge(listener.cluster, spoken.lowest, spoken.highest, nonce)


def hello(identity: Identity, challenged: Message, nonce: bytes) -> Hello:
    """The dialler's answer to what should be a Challenge.

    Raises MalformedMessage if it is none, AccessDenied for another cluster, VersionMismatch.
    """
    if isinstance(challenged, Failure):
        raise error_of(challenged)
    if not isinstance(challenged, Challenge):
        raise MalformedMessage(f"greeting: got {type(challenged).__name__}, want Challenge")
    _check_nonce(challenged.nonce)
    if identity.cluster and identity.cluster != challenged.cluster:
        raise AccessDenied(f"this is cluster {challenged.cluster!r}, not {identity.cluster!r}")
    _common_version(_spoken_by(challenged), identity.versions)
    said = Hello(
        identity.versions.lowest, identity.versions.highest, identity.role.value,
        identity.tenant, identity.name, identity.session, nonce, proof=b"", host=identity.host,
    )  # fmt: skip
    return _with_proof(said, _dialler_proof(identity.secret, challenged, said))


def welcome(
    listener: ListenerIdentity, challenged: Challenge, said: Message, *, is_local: bool
) -> Welcome:
    """The listener's answer to what should be a Hello. `is_local`: it came from this host.

    Raises MalformedMessage, VersionMismatch, or AccessDenied for a role that this listener does
    not serve, a wrong proof, or a distant peer of a listener that has no secret.
    """
    if not isinstance(said, Hello):
        raise MalformedMessage(f"greeting: got {type(said).__name__}, want Hello")
    _check_hello(said)
    version = _common_version(_spoken_by(challenged), _spoken_by(said))
    if listener.secret is None and not is_local:
        raise AccessDenied("this listener has no cluster secret and serves its own host only")
    if not hmac.compare_digest(_dialler_proof(listener.secret, challenged, said), said.proof):
        raise AccessDenied(
            "wrong cluster secret" if listener.secret else "this listener has no cluster secret"
        )
    if said.role not in listener.roles:
        raise AccessDenied(f"role {said.role!r} is not served here")
    local_address = listener.local_address if is_local else ""
    answer = Welcome(version, listener.epoch, listener.life, local_address, proof=b"")
    proof = _listener_proof(listener.secret, challenged, said, answer)
    return Welcome(version, listener.epoch, listener.life, local_address, proof)


def check_welcome(
    identity: Identity, challenged: Challenge, said: Hello, answer: Message
) -> Welcome:
    """The listener's Welcome, if that is what it is and it proves the dialler's secret."""
    if isinstance(answer, Failure):
        raise error_of(answer)
    if not isinstance(answer, Welcome):
        raise MalformedMessage(f"greeting: got {type(answer).__name__}, want Welcome")
    if answer.version != _common_version(_spoken_by(challenged), identity.versions):
        raise MalformedMessage(f"greeting: Welcome names version {answer.version}")
    want = _listener_proof(identity.secret, challenged, said, answer)
    if not hmac.compare_digest(want, answer.proof):
        raise AccessDenied("the listener does not prove the cluster secret")
    return answer


def _spoken_by(message: Challenge | Hello) -> VersionRange:
    lowest, highest = message.version_min, message.version_max
    if not 1 <= lowest <= highest <= VERSION_LIMIT:
        raise MalformedMessage(f"greeting: versions {lowest} to {highest}")
    return VersionRange(lowest, highest)


def _common_version(listener: VersionRange, dialler: VersionRange) -> int:
    version = listener.highest_common(dialler)
    if version is None:
        raise VersionMismatch(
            f"the listener speaks protocol versions {listener}, the dialler {dialler}"
        )
    return version


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise MalformedMessage(f"greeting: nonce of {len(nonce)} bytes, want {NONCE_BYTES}")


def _check_hello(said: Hello) -> None:
    _check_nonce(said.nonce)
    if len(said.session) != SESSION_BYTES:
        raise MalformedMessage(f"greeting: session of {len(said.session)} bytes")
    if len(said.proof) not in (0, PROOF_BYTES):
        raise MalformedMessage(f"greeting: proof of {len(said.proof)} bytes")
    for field in ("role", "tenant", "name", "host"):
        text: str = getattr(said, field)
        if len(text.encode()) > limits.NAME_BYTES_MAX:
            raise MalformedMessage(f"greeting: {field} exceeds {limits.NAME_BYTES_MAX} bytes")
    if said.role not in frozenset(Role):
        raise AccessDenied(f"unknown role {said.role[:40]!r}")


def _with_proof(said: Hello, proof: bytes) -> Hello:
    return Hello(
        said.version_min, said.version_max, said.role, said.tenant, said.name,
        said.session, said.nonce, proof, said.host,
    )  # fmt: skip


def _dialler_proof(secret: bytes | None, challenged: Challenge, said: Hello) -> bytes:
    if secret is None:
        return b""
    return hmac.digest(secret, encode_fields(_DIALLER_TAG, _spoken(challenged, said)), "sha256")


def _listener_proof(
    secret: bytes | None, challenged: Challenge, said: Hello, answer: Welcome
) -> bytes:
    if secret is None:
        return b""
    spoken = [
        *_spoken(challenged, said),
        ("version", answer.version),
        ("epoch", str(answer.epoch)),
        ("life", answer.life),
        ("local_address", answer.local_address),
    ]
    return hmac.digest(secret, encode_fields(_LISTENER_TAG, spoken), "sha256")


def _spoken(challenged: Challenge, said: Hello) -> list[tuple[str, FieldValue]]:
    """What both have said before the dialler's proof."""
    return [
        ("cluster", challenged.cluster),
        ("listener_versions", (challenged.version_min, challenged.version_max)),
        ("listener_nonce", challenged.nonce),
        ("dialler_versions", (said.version_min, said.version_max)),
        ("role", said.role),
        ("tenant", said.tenant),
        ("name", said.name),
        ("host", said.host),
        ("session", said.session),
        ("dialler_nonce", said.nonce),
    ]
