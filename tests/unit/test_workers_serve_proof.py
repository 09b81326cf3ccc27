"""How gateways prove the cluster secret to inference workers."""

from __future__ import annotations

import itertools

from workers.serve_proof import Doorkeeper, prove

SECRET = b"s" * 32


def door(secret: bytes | None = SECRET, seen_max: int = 100) -> Doorkeeper:
    salts = itertools.count()
    return Doorkeeper(secret, seen_max, lambda: f"salt{next(salts)}")


def test_a_proof_is_good_once_for_one_question_to_one_worker() -> None:
    keeper = door()
    header = prove(SECRET, keeper.salt, "/decode", b"body")
    assert not keeper.admits(header, "/decode", b"other")
    assert not keeper.admits(header, "/prefill", b"body")
    assert keeper.admits(header, "/decode", b"body")
    assert not keeper.admits(header, "/decode", b"body")
    assert not Doorkeeper(SECRET).admits(header, "/decode", b"body")


def test_another_secret_proves_nothing() -> None:
    keeper = door()
    for header in ("", ":", "x", prove(b"other", keeper.salt, "/decode", b"")):
        assert not keeper.admits(header, "/decode", b"")


def test_a_number_cannot_be_moved_into_the_path() -> None:
    keeper = door()
    number, _, proof = prove(SECRET, keeper.salt, "/decode", b"").partition(":")
    assert not keeper.admits(f"{number[:-1]}:{proof}", f"{number[-1]}/decode", b"")


def test_a_new_salt_comes_before_a_number_is_forgotten() -> None:
    keeper = door(seen_max=3)
    said = [prove(SECRET, "salt0", "/decode", bytes([i])) for i in range(3)]
    assert all(keeper.admits(header, "/decode", bytes([i])) for i, header in enumerate(said))
    assert keeper.salt == "salt1"
    assert not any(keeper.admits(header, "/decode", bytes([i])) for i, header in enumerate(said))
    assert keeper.admits(prove(SECRET, "salt1", "/decode", b""), "/decode", b"")


def test_without_a_secret_everybody_is_let_in() -> None:
    assert door(None).admits("", "/decode", b"")
