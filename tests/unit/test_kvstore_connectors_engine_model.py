"""A model is told by its weights and its configuration, wherever it lies."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.engine_model import config_digest, revision_of, weights_digest
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_named_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    (tmp_path / "README").write_text("says nothing of the weights")
    one = revision_of(str(tmp_path), None)
    assert one == weights_digest(tmp_path)
    (tmp_path / "README").write_text("changed")
    assert revision_of(str(tmp_path), COMMIT) == one
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert revision_of(str(tmp_path), None) != one


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_a_folder_is_named_by_how_it_sees_pictures_too(tmp_path: Path, name: str) -> None:
    """The same picture under the same hash comes to other KV where it is scaled otherwise."""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    plain = revision_of(str(tmp_path), None)
    assert plain == f"sha256:{hashlib.sha256(b'model.safetensors:3;one').hexdigest()}", "as ever"
    revisions = {plain}
    for said in ("{}", '{"size": 224}', '{"size": 448}'):
        (tmp_path / name).write_text(said)
        revisions.add(revision_of(str(tmp_path), None))
    assert len(revisions) == 4
    (tmp_path / name).unlink()
    assert revision_of(str(tmp_path), None) == plain


def test_a_snapshot_of_a_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert revision_of(str(folder), None) == COMMIT


@pytest.mark.parametrize("revision", [None, "", "main"])
def test_weights_that_have_no_name_are_refused(revision: str | None) -> None:
    assert revision_of("org/model", COMMIT) == COMMIT
    with pytest.raises(BadValue, match="revision"):
        revision_of("org/model", revision)


def test_a_folder_whose_weights_are_not_seen_is_refused(tmp_path: Path) -> None:
    """Or two models with weights of other kinds would share their KV."""
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.tensors").write_bytes(b"one")
    with pytest.raises(BadValue, match=r"^revision.*\.safetensors"):
        revision_of(str(tmp_path), None)


def test_a_models_configuration_is_told_apart_by_what_it_says_of_the_model() -> None:
    one = config_digest({"rope_theta": 1e4, "transformers_version": "1"})
    assert one == config_digest({"transformers_version": "2", "rope_theta": 1e4})
    assert one != config_digest({"rope_theta": 1e5, "transformers_version": "1"})
