"""Has `import mooncake.store` bring kvstore.connectors.mooncake, in a program that the shim runs.

Python imports this file by itself, as `sitecustomize`, in the program and in all that it starts.
Standard library only until the program asks for the store. `mooncake.engine` and everything else
of an installed Mooncake stay as they are.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

STORE: Final = "mooncake.store"
PACKAGE: Final = "mooncake"
OURS: Final = "kvstore.connectors.mooncake"


class StoreLoader(Loader):
    """Fills the module with our names."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The usual module."""

    def exec_module(self, module: ModuleType) -> None:
        """ImportError says so where kvharbor is not installed for this Python."""
        ours = import_module(OURS)
        named = {name: value for name, value in vars(ours).items() if not name.startswith("__")}
        vars(module).update(named)
        module.__doc__ = ours.__doc__


class EmptyPackage(Loader):
    """Stands for Mooncake where that is not installed."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The usual module."""

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class StoreFinder(MetaPathFinder):
    """Goes before all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of the store alone."""
        return spec_from_loader(name, StoreLoader()) if name == STORE else None


class PackageFinder(MetaPathFinder):
    """Comes after all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of the package, where nobody else has found it."""
        if name != PACKAGE:
            return None
        return spec_from_loader(name, EmptyPackage(), is_package=True)


def install() -> None:
    """Put ours before Mooncake's, from now on."""
    sys.meta_path.insert(0, StoreFinder())
    sys.meta_path.append(PackageFinder())


def run_shadowed(here: str) -> None:
    """Run the sitecustomize that Python would have found without this folder, if there is one."""
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if each != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    install()
    run_shadowed(str(Path(__file__).parent))
