"""`kvharbor doctor engine`: what an engine's KV is called, and why two do not share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kvstore.cli.main import app
from kvstore.connectors.engine_namespace import (
    EngineFields,
    EngineGroup,
    as_text,
    namespaces,
    of_text,
)
from kvstore.errors import BadValue
from kvstore.namespace import Attention

if TYPE_CHECKING:
    from pathlib import Path


def fields(**changes: str) -> EngineFields:
    values = {
        "engine": "vllm 0.32", "model": "m", "revision": "r", "tenant": "t",
        "kv_dtype": "bfloat16", "compute_dtype": "bfloat16", "quantization": "none",
        "config_digest": "c", "hash_algorithm": "sha256_cbor", "hash_seed": "s",
        "block_order": "o", **changes,
    }  # fmt: skip
    group = EngineGroup(Attention.FULL, ("l0",), 2, 32, 32)
    return EngineFields(**values, block_tokens=32, tensor_parallel=1, groups=(group,), rows={})


@pytest.fixture
def described(tmp_path: Path) -> tuple[str, str, str]:
    """Files of an engine, of its twin, and of another."""
    made = {"one": fields(), "twin": fields(), "other": fields(revision="r2")}
    for name, each in made.items():
        (tmp_path / name).write_text(as_text(each))
    one, twin, other = (str(tmp_path / name) for name in made)
    return one, twin, other


def test_a_description_is_read_as_it_was_written() -> None:
    assert of_text(as_text(fields())) == fields()


def test_every_field_and_the_namespaces_are_shown(described: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["doctor", "engine", described[0]])
    assert done.exit_code == 0
    assert "revision: r" in done.stdout
    assert namespaces(fields())[0].id.hex() in done.stdout
    shown = json.loads(CliRunner().invoke(app, ["--json", "doctor", "engine", described[0]]).stdout)
    assert shown["groups[0].kv_heads"] == "2"


def test_what_keeps_two_engines_apart_is_named(described: tuple[str, str, str]) -> None:
    one, twin, other = described
    done = CliRunner().invoke(app, ["doctor", "engine", one, other])
    assert (done.exit_code, done.stdout) == (1, "revision: r here, r2 there\n")
    done = CliRunner().invoke(app, ["doctor", "engine", one, twin, "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"differences": []})


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="description"):
        of_text(text)
    (tmp_path / "file").write_text(text)
    done = CliRunner().invoke(app, ["doctor", "engine", str(tmp_path / "file")])
    assert isinstance(done.exception, BadValue)
    done = CliRunner().invoke(app, ["doctor", "engine", str(tmp_path / "nothing")])
    assert isinstance(done.exception, BadValue)
