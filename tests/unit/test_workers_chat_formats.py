"""Chat formats without their models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvstore.errors import ConfigError
from workers.chat_formats import ASSISTANT, END, USER, ByteChat, load_folder

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {"[end]": 0, "user": 1, "assistant": 2, "hello": 3, "you": 4, "[unknown]": 5}
TEMPLATE = (
    "{% for each in messages %}{{ each['role'] }} {{ each['content'] }} [end] {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, with a tokenizer of six words."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["[end]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[end]"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_a_folders_chat_is_by_its_template(folder: Path) -> None:
    chat = load_folder(folder)
    assert chat.conversation([("user", "hello"), ("assistant", "you")]) == [1, 3, 0, 2, 4, 0, 2]
    assert (chat.end_token, chat.vocabulary) == (0, 6)
    assert chat.encode("hello you") == [3, 4]
    assert chat.text([3, 4, 0]) == "hello you"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load_folder(folder)


def test_an_end_that_is_no_token_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    with pytest.raises(ConfigError, match=r"eos_token '<\|end\|>'"):
        load_folder(folder)


def test_a_template_reaches_nothing(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.append(1) }}{{ ''.__class__ }}")
    with pytest.raises(Exception, match="unsafe"):
        load_folder(folder).conversation([("user", "hello")])


def test_bytes_are_tokens_between_marks_of_who_speaks() -> None:
    said = ByteChat().conversation([("system", "a"), ("assistant", "b")])
    assert said == [USER, ord("a"), END, ASSISTANT, ord("b"), END, ASSISTANT]
