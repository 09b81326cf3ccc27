"""The greeting: who is let in, who is refused and why, and what a proof is good for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import (
    AccessDenied,
    BadValue,
    KVStoreError,
    MalformedMessage,
    NotLeader,
    VersionMismatch,
)
from kvstore.rpc import handshake
from kvstore.rpc.failure import error_of, failure_of
from kvstore.rpc.identity import (
    OUR_VERSIONS,
    Identity,
    ListenerIdentity,
    Role,
    VersionRange,
    new_session,
)
from kvstore.wire.encoding import encode
from kvstore.wire.messages.hello import Challenge, Done, Failure, Hello, Welcome

NONCE = b"listener's nonce"
OTHER_NONCE = b"dialler's nonce!"
SECRET = b"secret of the cluster"
LISTENER = ListenerIdentity("blue", SECRET, epoch=5)
OPEN_LISTENER = ListenerIdentity("blue", epoch=5)
DIALLER = Identity(Role.ENGINE, "acme", "engine-1", SECRET, session=b"s" * 16, host="h1")
OPEN_DIALLER = replace(DIALLER, secret=None)


def greet(
    listener: ListenerIdentity, identity: Identity, *, is_local: bool = True
) -> tuple[Hello, Welcome]:
    """Both sides' messages, each checked by the other side."""
    challenged = handshake.challenge(listener, NONCE)
    said = handshake.hello(identity, challenged, OTHER_NONCE)
    answer = handshake.welcome(listener, challenged, said, is_local=is_local)
    return said, handshake.check_welcome(identity, challenged, said, answer)


@pytest.mark.parametrize("is_local", [True, False])
def test_both_sides_prove_the_secret(is_local: bool) -> None:
    said, answer = greet(LISTENER, DIALLER, is_local=is_local)
    assert (said.role, said.tenant, said.name, said.host) == ("engine", "acme", "engine-1", "h1")
    assert said.session == DIALLER.session
    assert (answer.version, answer.epoch) == (OUR_VERSIONS.highest, 5)
    assert SECRET not in encode(said) + encode(answer)


def test_without_a_secret_only_this_host_is_served() -> None:
    said, answer = greet(OPEN_LISTENER, OPEN_DIALLER)
    assert said.proof == answer.proof == b""
    with pytest.raises(AccessDenied, match="its own host only"):
        greet(OPEN_LISTENER, OPEN_DIALLER, is_local=False)


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("identity", [OPEN_DIALLER, replace(DIALLER, secret=b"guess")])
def test_a_wrong_secret_is_refused(identity: Identity, is_local: bool) -> None:
    with pytest.raises(AccessDenied, match="wrong cluster secret"):
        greet(LISTENER, identity, is_local=is_local)


def test_a_listener_that_knows_no_secret_is_refused_by_a_dialler_that_does() -> None:
    with pytest.raises(AccessDenied, match="has no cluster secret"):
        greet(OPEN_LISTENER, DIALLER)
    challenged = handshake.challenge(OPEN_LISTENER, NONCE)
    said = handshake.hello(DIALLER, challenged, OTHER_NONCE)
    for proof in (b"", bytes(32), said.proof):
        impostor = Welcome(OUR_VERSIONS.highest, 5, bytes(16), "", proof)
        with pytest.raises(AccessDenied, match="does not prove"):
            handshake.check_welcome(DIALLER, challenged, said, impostor)


def test_who_is_on_this_host_learns_of_the_unix_socket() -> None:
    listener = replace(LISTENER, local_address="unix:/run/kvharbor/master.sock")
    for is_local, told in ((True, listener.local_address), (False, "")):
        _, answer = greet(listener, DIALLER, is_local=is_local)
        assert (answer.local_address, answer.life) == (told, listener.life)


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 6}, {"life": b"another's life.."}, {"local_address": "unix:/tmp/trap"}],
)
def test_a_welcome_is_good_for_exactly_what_it_says(changes: dict[str, object]) -> None:
    challenged = handshake.challenge(LISTENER, NONCE)
    said = handshake.hello(DIALLER, challenged, OTHER_NONCE)
    answer = handshake.welcome(LISTENER, challenged, said, is_local=True)
    with pytest.raises(AccessDenied, match="does not prove"):
        handshake.check_welcome(
            DIALLER, challenged, said, msgspec.structs.replace(answer, **changes)
        )


def test_every_listener_has_a_life_of_its_own() -> None:
    assert ListenerIdentity("blue").life != ListenerIdentity("blue").life
    assert replace(LISTENER, epoch=6).life == LISTENER.life


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "operator"},
        {"tenant": "other"},
        {"name": "engine-2"},
        {"host": "another"},
        {"session": b"t" * 16},
        {"nonce": b"another nonce..."},
        {"version_max": 9},
    ],
)
def test_a_proof_is_good_for_exactly_what_was_said(changes: dict[str, object]) -> None:
    challenged = handshake.challenge(LISTENER, NONCE)
    said = handshake.hello(DIALLER, challenged, OTHER_NONCE)
    forged = msgspec.structs.replace(said, **changes)
    with pytest.raises(AccessDenied, match="wrong cluster secret"):
        handshake.welcome(LISTENER, challenged, forged, is_local=True)


def test_a_recorded_hello_is_worthless_on_another_connection() -> None:
    recorded, _ = greet(LISTENER, DIALLER)
    challenged = handshake.challenge(LISTENER, b"fresh nonce here")
    with pytest.raises(AccessDenied):
        handshake.welcome(LISTENER, challenged, recorded, is_local=True)


def test_nonces_and_sessions_are_fresh() -> None:
    assert handshake.new_nonce() != handshake.new_nonce()
    assert new_session() != new_session()
    renewed = DIALLER.renewed()
    assert renewed.session != DIALLER.session
    assert replace(renewed, session=DIALLER.session) == DIALLER


@pytest.mark.parametrize(
    ("listener", "dialler", "version"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 2), (2, 3), 2), ((3, 4), (2, 3), 3)],
)
def test_neighbouring_versions_work_together(
    listener: tuple[int, int], dialler: tuple[int, int], version: int
) -> None:
    _, answer = greet(
        replace(LISTENER, versions=VersionRange(*listener)),
        replace(DIALLER, versions=VersionRange(*dialler)),
    )
    assert answer.version == version


@pytest.mark.parametrize(("listener", "dialler"), [((1, 1), (2, 3)), ((4, 5), (2, 3))])
def test_strangers_are_refused_by_both_sides_with_both_ranges_named(
    listener: tuple[int, int], dialler: tuple[int, int]
) -> None:
    strange = replace(LISTENER, versions=VersionRange(*listener))
    identity = replace(DIALLER, versions=VersionRange(*dialler))
    named = f"listener speaks protocol versions {listener[0]} to {listener[1]}, the dialler 2 to 3"
    challenged = handshake.challenge(strange, NONCE)
    with pytest.raises(VersionMismatch, match=named):
        handshake.hello(identity, challenged, OTHER_NONCE)
    # A dialler that does not look at the Challenge is told as well.
    said = handshake.hello(identity, handshake.challenge(LISTENER_2_TO_3, NONCE), OTHER_NONCE)
    with pytest.raises(VersionMismatch, match=named):
        handshake.welcome(strange, challenged, said, is_local=True)


LISTENER_2_TO_3 = replace(LISTENER, versions=VersionRange(2, 3))


def test_a_version_pushed_down_on_the_way_is_noticed() -> None:
    identity = replace(DIALLER, versions=VersionRange(2, 3))
    challenged = handshake.challenge(LISTENER_2_TO_3, NONCE)
    weakened = msgspec.structs.replace(challenged, version_max=2)
    said = handshake.hello(identity, weakened, OTHER_NONCE)
    with pytest.raises(AccessDenied):
        handshake.welcome(LISTENER_2_TO_3, challenged, said, is_local=True)
    answer = Welcome(2, 5, bytes(16), "", bytes(32))
    with pytest.raises(MalformedMessage, match="names version 2"):
        handshake.check_welcome(identity, challenged, said, answer)


def test_another_cluster_is_refused_with_both_names() -> None:
    assert greet(LISTENER, replace(DIALLER, cluster="blue"))
    with pytest.raises(AccessDenied, match="'blue', not 'green'"):
        greet(LISTENER, replace(DIALLER, cluster="green"))


def test_roles_that_a_listener_does_not_serve_are_refused() -> None:
    listener = replace(LISTENER, roles=frozenset({Role.WORKER, Role.MASTER}))
    assert greet(listener, replace(DIALLER, role=Role.WORKER))
    with pytest.raises(AccessDenied, match="role 'engine'"):
        greet(listener, DIALLER)


def test_an_unknown_role_is_refused() -> None:
    said, _ = greet(OPEN_LISTENER, OPEN_DIALLER)
    strange = msgspec.structs.replace(said, role="root")
    with pytest.raises(AccessDenied, match="unknown role 'root'"):
        handshake.welcome(
            OPEN_LISTENER, handshake.challenge(OPEN_LISTENER, NONCE), strange, is_local=True
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"short"},
        {"session": b""},
        {"proof": b"x"},
        {"tenant": "x" * 513},
        {"name": "é" * 257},
        {"version_min": 0},
        {"version_min": 3, "version_max": 2},
        {"version_max": 1 << 63},
        {"version_min": -1},
    ],
)
def test_a_hello_out_of_shape_is_malformed(changes: dict[str, object]) -> None:
    said, _ = greet(OPEN_LISTENER, OPEN_DIALLER)
    bad = msgspec.structs.replace(said, **changes)
    with pytest.raises(MalformedMessage):
        handshake.welcome(
            OPEN_LISTENER, handshake.challenge(OPEN_LISTENER, NONCE), bad, is_local=True
        )


def test_other_messages_in_place_of_the_greeting() -> None:
    challenged = handshake.challenge(LISTENER, NONCE)
    said = handshake.hello(DIALLER, challenged, OTHER_NONCE)
    with pytest.raises(MalformedMessage, match="want Challenge"):
        handshake.hello(DIALLER, Done(), OTHER_NONCE)
    with pytest.raises(MalformedMessage, match="want Hello"):
        handshake.welcome(LISTENER, challenged, challenged, is_local=True)
    with pytest.raises(MalformedMessage, match="want Welcome"):
        handshake.check_welcome(DIALLER, challenged, said, said)
    refusal = failure_of(AccessDenied("go away"))
    for ask in (
        lambda: handshake.hello(DIALLER, refusal, OTHER_NONCE),
        lambda: handshake.check_welcome(DIALLER, challenged, said, refusal),
    ):
        with pytest.raises(AccessDenied, match="go away"):
            ask()


ints = st.integers(-(1 << 63), (1 << 64) - 1)
hellos = st.builds(
    Hello, ints, ints, st.text(), st.text(), st.text(), st.binary(), st.binary(), st.binary()
)


@given(hellos, st.sampled_from([LISTENER, OPEN_LISTENER]))
def test_any_hello_is_answered_or_refused(said: Hello, listener: ListenerIdentity) -> None:
    challenged = handshake.challenge(listener, NONCE)
    with pytest.raises((AccessDenied, MalformedMessage, VersionMismatch)):
        handshake.welcome(listener, challenged, said, is_local=False)


@given(st.builds(Challenge, st.text(), ints, ints, st.binary()))
def test_any_challenge_is_answered_or_refused(challenged: Challenge) -> None:
    try:
        handshake.hello(DIALLER, challenged, OTHER_NONCE)
    except (AccessDenied, MalformedMessage, VersionMismatch):
        return


@given(st.builds(Welcome, ints, ints, st.binary(), st.text(), st.binary()))
def test_any_welcome_but_the_right_one_is_refused(answer: Welcome) -> None:
    challenged = handshake.challenge(LISTENER, NONCE)
    said = handshake.hello(DIALLER, challenged, OTHER_NONCE)
    with pytest.raises(KVStoreError):
        handshake.check_welcome(DIALLER, challenged, said, answer)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"secret": b""}, "secret"),
        ({"session": b"short"}, "session"),
        ({"tenant": "x" * 513}, "tenant"),
        ({"name": "x" * 513}, "name"),
        ({"host": "x" * 513}, "host"),
    ],
)
def test_identities_that_nobody_would_take_cannot_be_made(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(BadValue) as caught:
        Identity(Role.ENGINE, **changes)  # type: ignore[arg-type]  # values by table
    assert caught.value.field == field


def test_an_empty_secret_is_no_secret() -> None:
    with pytest.raises(BadValue, match="secret"):
        ListenerIdentity("blue", b"")


def test_secrets_are_not_shown() -> None:
    assert SECRET.decode() not in repr(DIALLER)
    assert SECRET.decode() not in repr(LISTENER)


def test_failures_carry_the_error_and_nothing_absurd() -> None:
    error = AccessDenied("x" * 5000)
    error.retry_after_s = 0.5
    assert len(failure_of(error).text) <= 2000
    back = error_of(failure_of(error))
    assert isinstance(back, AccessDenied)
    assert back.retry_after_s == 0.5
    for absurd in (float("inf"), float("nan"), -1.0):
        assert error_of(Failure("unavailable", "", absurd)).retry_after_s == 0.0
    assert type(error_of(Failure("of the future", "?"))) is KVStoreError
    assert failure_of(KVStoreError("\ud800")).text == "?"


def test_who_does_not_lead_says_where_the_leader_is() -> None:
    error = NotLeader(("10.0.0.2:7700", "unix:/run/master.sock"))
    assert "10.0.0.2:7700, unix:/run/master.sock" in str(error)
    back = error_of(failure_of(error))
    assert isinstance(back, NotLeader)
    assert (str(back), back.where) == (str(error), error.where)
    assert getattr(error_of(Failure("not_leader", "")), "where", None) == ()
    assert "nor does it know" in str(NotLeader())
