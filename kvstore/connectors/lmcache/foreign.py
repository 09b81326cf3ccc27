"""Values of LMCache's as they are read here: LMCache is not there where types are checked."""

from __future__ import annotations

from typing import Any, TypeAlias

Lmcache: TypeAlias = Any
"""Some object of LMCache's; attributes that it lacks are found by the tests with the real one."""
