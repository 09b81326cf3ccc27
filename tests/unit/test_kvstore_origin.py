"""The check that our packages lie side by side, with made-up intruders on the path."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvstore import origin
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let the next look-up of a package go through the import path."""
    monkeypatch.delitem(sys.modules, package, raising=False)


def test_our_own_packages_are_accepted() -> None:
    origin.require_one_origin()


@pytest.mark.parametrize("name", ["policies/__init__.py", "policies.py"])
def test_an_intruder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intruder = tmp_path / name
    intruder.parent.mkdir(exist_ok=True)
    intruder.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    forget(monkeypatch, "policies")
    with pytest.raises(
        origin.ForeignPackage, match=r"^package 'policies' is the one at "
    ) as caught:
        origin.require_one_origin()
    assert str(intruder) in str(caught.value)
    assert caught.value.package == "policies"
    assert isinstance(caught.value, ConfigError)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PACKAGES", ("kvstore", "no_such_package_of_ours"))
    with pytest.raises(origin.ForeignPackage, match="'no_such_package_of_ours' is missing"):
        origin.require_one_origin()


def test_a_bare_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_folder_of_ours").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(origin, "PACKAGES", ("bare_folder_of_ours",))
    with pytest.raises(origin.ForeignPackage, match="a bare folder"):
        origin.require_one_origin()
