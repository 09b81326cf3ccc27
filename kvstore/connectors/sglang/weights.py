"""Whether an engine has other weights by now than its namespace names. Imports none of SGLang.

SGLang tells its storage of no change of weights. But it notes which of its settings are changed:
the path of a model that is read from disk, even where it is the one of before, and the version
that is given to weights which come in another way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Changes = Sequence[tuple[str, Mapping[str, object]]]
    """Who changed settings, and to what, oldest first."""

_LOG: Final = logging.getLogger("kvharbor")
SIGNS: Final = frozenset({"model_path", "weight_version"})


class Weights:
    """Those of one rank's engine. Thread-safe."""

    def __init__(self, changes: Callable[[], Changes]) -> None:
        """`changes` tells all that were made since the engine began to start."""
        self._changes = changes
        self._are_others = False

    def are_named(self) -> bool:
        """Whether they are those that the engine was started with; once they are not, never."""
        if not self._are_others and any(SIGNS & fields.keys() for _, fields in self._changes()):
            self._are_others = True
            _LOG.warning(
                "kvharbor: this engine has been given other weights than it was started with: it "
                "goes on without the pool until it is started anew"
            )
        return not self._are_others
