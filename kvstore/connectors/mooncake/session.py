"""What all calls of the drop-in share: being set up, and turning errors into codes.

Owns the connection to the pool. No error of the pool's leaves it: a program that was written for
codes is told a code, and the log says why.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.client.store import KVStore
from kvstore.connectors.mooncake.addresses import Regions
from kvstore.connectors.mooncake.codes import Code, code_of_error
from kvstore.connectors.mooncake.objects import Objects
from kvstore.connectors.mooncake.settings import settings_of
from kvstore.errors import BadValue, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.connectors.mooncake.settings import Settings

_LOG: Final = logging.getLogger("kvharbor")
T = TypeVar("T")


class Session:
    """A store that may be set up."""

    def __init__(self) -> None:
        """Reach nothing yet."""
        self._regions = Regions()
        self._objects: Objects | None = None
        self._hostname = ""

    def setup(self, *args: object, **kwargs: object) -> int:
        """Reach the pool: arguments as in Mooncake, positional or one dict; 0 or a code.

        The pool is that of KVHARBOR_MASTER, else of `master_server_addr`.
        """
        settings: Settings | None = None
        try:
            settings = settings_of(args, kwargs, os.environ)
            self.close()
            self._objects = Objects(_connect(settings), settings.namespace)
        except BadValue as error:
            _LOG.error("mooncake: setup: %s", error)
            return Code.INVALID_PARAMS
        except (KVStoreError, OSError) as error:
            _LOG.error("mooncake: setup: %s", error)
            return code_of_error(error) if isinstance(error, KVStoreError) else Code.INVALID_PARAMS
        self._hostname = settings.hostname
        return Code.OK

    def close(self) -> int:
        """Let the pool go; 0, also where there was none."""
        objects, self._objects = self._objects, None
        if objects is not None:
            objects.close()
            objects.store.close()
        return Code.OK

    def health_check(self) -> int:
        """0 the pool answers, 1 not set up, 2 no master answers."""
        if self._objects is None:
            return 1
        try:
            self._objects.store.stat()
        except KVStoreError:
            return 2
        return 0

    def get_hostname(self) -> str:
        """What `setup` was told."""
        return self._hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Say that such memory will be put from and read into."""
        return self._regions.register(buffer_ptr, size)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Take that back."""
        return self._regions.unregister(buffer_ptr)

    def _carry_out(self, call: Callable[[Objects], T], failed: Callable[[Code], T]) -> T:
        """What the call returns, or what `failed` makes of the code of its error."""
        objects = self._objects
        if objects is None:
            _LOG.error("mooncake: setup() comes first")
            return failed(Code.INVALID_PARAMS)
        try:
            return call(objects)
        except KVStoreError as error:
            _LOG.warning("mooncake: %s", error)
            return failed(code_of_error(error))


def _connect(settings: Settings) -> KVStore:
    return KVStore.connect(
        settings.masters, tenant=settings.tenant, secret=settings.secret(), name=settings.hostname
    )


def names_of(keys: Sequence[str]) -> list[bytes]:
    """Keys as the pool has them. TypeError for anything but text."""
    try:
        return list(map(str.encode, keys))
    except (TypeError, UnicodeEncodeError):
        return [name_of(key) for key in keys]


def name_of(key: str) -> bytes:
    """A key as the pool has it. TypeError for anything but text."""
    if not isinstance(key, str):
        raise TypeError(f"a key is text, not {type(key).__name__}")
    return key.encode("utf-8", "surrogatepass")
