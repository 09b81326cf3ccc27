"""Where our packages come from: the check that both servers make before anything else.

Owns the list of our top-level packages. PyPI and users have packages of the same names, and a
folder called `workers` in the wrong place on the path would be imported in silence; so a start
stops unless all four packages lie side by side. Must not import any of the others.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Final

from kvstore.errors import ConfigError

PACKAGES: Final = ("kvstore", "master", "policies", "workers")


class ForeignPackage(ConfigError):
    """A package under one of our names is not ours: the text names it and where it lies."""

    code: ClassVar[str] = "foreign_package"

    def __init__(self, package: str, found: str, home: Path) -> None:
        """Name the intruder, where it was found, and the folder that holds our packages."""
        super().__init__(
            f"package {package!r} is {found}, not the one beside kvstore in {home}: "
            f"take it off the import path, or install kvharbor into an environment of its own"
        )
        self.package = package


def require_one_origin() -> None:
    """Raise `ForeignPackage` unless all our packages lie in the folder that holds this one.

    Only looks them up; imports none.
    """
    home = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None:
            raise ForeignPackage(package, "missing", home)
        if spec.origin is None:  # a folder without __init__.py
            raise ForeignPackage(package, f"a bare folder, {spec.submodule_search_locations}", home)
        if Path(spec.origin).resolve() != home / package / "__init__.py":
            raise ForeignPackage(package, f"the one at {spec.origin}", home)
