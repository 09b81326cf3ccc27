"""Prompts about a document: how they begin alike, and how a chat goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from workers.chat_formats import ASSISTANT, END, ByteChat
from workers.conversation import question_tokens, read_document, shared_tokens

if TYPE_CHECKING:
    from pathlib import Path

CHAT = ByteChat()


@given(st.text(max_size=200), st.text(min_size=1, max_size=20))
def test_every_prompt_begins_with_what_is_shared(document: str, question: str) -> None:
    shared = shared_tokens(CHAT, document)
    assert question_tokens(CHAT, document, question)[: len(shared)] == shared
    assert CHAT.text(shared).startswith("Text:")
    assert len(shared) >= len(document.encode())


def test_a_chat_goes_on_after_an_answer() -> None:
    more = CHAT.follow_up("And?")
    assert more[0] == END
    assert more[-1] == ASSISTANT
    assert "And?" in CHAT.text(more)


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    for name, text in (("a", "one\n"), ("b", "\ntwo ä")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_document([tmp_path / "a", tmp_path / "b"]) == "one\n\ntwo ä"


def test_a_document_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for bad in ("missing", "binary"):
        with pytest.raises(ConfigError, match=bad):
            read_document([tmp_path / bad])
