"""Questions about a document, as tokens: what every prompt shares, and how a chat goes on.

Owns the wording around document and question. The document comes first, so that the prompts of
all questions begin alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from workers.generation import Chat


def read_document(paths: Sequence[Path]) -> str:
    """The files' texts, one after another. ConfigError naming a file that cannot be read."""
    texts: list[str] = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"document {path}: cannot be read: {error}") from error
    return "\n\n".join(texts)


def asked(question: str) -> str:
    """A question, with the form of answer that small models do best."""
    return f"{question} Answer with one short sentence from the text."


def question_tokens(chat: Chat, document: str, question: str) -> list[int]:
    """The prompt of a chat that opens with a question about the document."""
    return chat.prompt(f"Text:\n\n{document}\n\nQuestion: {asked(question)}")


def shared_tokens(chat: Chat, document: str) -> list[int]:
    """The tokens with which every prompt about this document begins."""
    one, other = (question_tokens(chat, document, name) for name in ("A", "B"))
    different = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[:different]
