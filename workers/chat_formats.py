"""Tokenizers that know their model's chat format, without the model: no torch is loaded.

What a gateway tokenises with must give the tokens that the model's workers were trained and tested
with; the programs that run models take the formats from here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template
    from tokenizers import Tokenizer

BYTE_VALUES: Final = 256
USER, ASSISTANT, END = BYTE_VALUES, BYTE_VALUES + 1, BYTE_VALUES + 2
VOCABULARY: Final = BYTE_VALUES + 3


class ChatFormat(Protocol):
    """What a gateway needs of a model's tokenizer."""

    @property
    def end_token(self) -> int:
        """What the model writes when its answer is complete."""
        ...

    @property
    def vocabulary(self) -> int:
        """Tokens are 0 to this, exclusive."""
        ...

    def conversation(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of (role, content) in turn, up to the assistant's next words."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, without marks of who speaks."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        ...


class ByteChat:
    """One token a byte, and three for who speaks."""

    end_token: Final = END
    vocabulary: Final = VOCABULARY

    def prompt(self, content: str) -> list[int]:
        """The user's message as bytes."""
        return [USER, *content.encode(), END, ASSISTANT]

    def follow_up(self, content: str) -> list[int]:
        """The end of an answer, then as a prompt."""
        return [END, *self.prompt(content)]

    def conversation(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Each message after its speaker's mark; whoever is not the assistant is the user."""
        tokens: list[int] = []
        for role, content in messages:
            speaker = ASSISTANT if role == "assistant" else USER
            tokens += [speaker, *content.encode(), END]
        return [*tokens, ASSISTANT]

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def text(self, tokens: Sequence[int]) -> str:
        """One character a byte; a dot for those that a terminal could not show."""
        return "".join(chr(t) if 32 <= t < 127 else "·" for t in tokens if t < BYTE_VALUES)


class FolderChat:
    """The tokenizer and the chat template of a folder as Hugging Face lays them out."""

    def __init__(self, tokenizer: Tokenizer, template: Template, end_token: int) -> None:
        """Hold what `load_folder` has read."""
        self._tokenizer = tokenizer
        self._template = template
        self.end_token: Final = end_token
        self.vocabulary: Final = int(tokenizer.get_vocab_size())

    def conversation(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """By the template."""
        said = [{"role": role, "content": content} for role, content in messages]
        return self.encode(self._template.render(messages=said, add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        """Marks that the text spells out become their tokens, as in the template's own text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """The answer without marks."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def chat_of(tokenizer: str) -> ByteChat | FolderChat:
    """The format of the model whose tokenizer is in this folder; of bytes where there is none."""
    return load_folder(Path(tokenizer)) if tokenizer else ByteChat()


def load_folder(folder: Path) -> FolderChat:
    """The format of the model in this folder; its template may compute, and reach nothing else.

    ConfigError naming a file that is not there.
    """
    # Only now: a gateway of the tiny model does without both.
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    # trim_blocks and lstrip_blocks are what templates are written for.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        template = environment.from_string((folder / "chat_template.jinja").read_text())
        end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"tokenizer {error.filename}: cannot be read: {error.strerror}"
        ) from error
    end_token = tokenizer.token_to_id(end)
    if end_token is None:
        raise ConfigError(f"tokenizer {folder}: eos_token {end!r} is no token of it")
    return FolderChat(tokenizer, template, int(end_token))
