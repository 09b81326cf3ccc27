"""What tells two models' KV apart, read from what engines know of a model: weights and settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_OF_THE_MODEL: Final = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)
"""Of a configuration: where it was found and who reads it."""
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".gguf"})
COMMIT_LETTERS: Final = 40
PROCESSOR: Final = "processor_config.json"
"""How the names of files end that say how pictures, films and sounds become a model's input."""
ADAPTER_CONFIG: Final = "adapter_config.json"
READ_BYTES: Final = 1 << 24


def config_digest(values: Mapping[str, object]) -> str:
    """SHA-256 of a model's configuration, less what says nothing of the model."""
    kept = {name: value for name, value in values.items() if name not in NOT_OF_THE_MODEL}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def revision_of(model: str, revision: str | None) -> str:
    """What names the weights of a model, by folder or id: a hub's commit, or a digest of the files.

    BadValue where neither can be had.
    """
    folder = Path(model)
    if not folder.is_dir():
        if revision and len(revision) == COMMIT_LETTERS:
            return revision
        want = "a commit of 40 letters, for a model that is no folder; or a revision of your own"
        raise BadValue("revision", revision, want)
    if folder.parent.name == "snapshots" and len(folder.name) == COMMIT_LETTERS:
        return folder.name
    return weights_digest(folder)


def adapter_of(folder: str) -> str:
    """What names a LoRA adapter: its weights, and the settings of how they are applied.

    BadValue where it is no folder.
    """
    return f"{revision_of(folder, None)} {file_digest(Path(folder) / ADAPTER_CONFIG)}"


def file_digest(path: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of all weight files in a folder, in the order of their names.

    And of its processors' settings, of which an engine's hash of a picture knows nothing. BadValue
    where there are no weights: all such folders would be one.
    """
    digest = hashlib.sha256()
    files = sorted(folder.iterdir())
    paths = [path for path in files if path.suffix in WEIGHTS]
    if not paths:
        want = f"a name of your own for the weights: {folder} has no {', '.join(sorted(WEIGHTS))}"
        raise BadValue("revision", "", want)
    for path in paths + [path for path in files if path.name.endswith(PROCESSOR)]:
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
    return f"sha256:{digest.hexdigest()}"
