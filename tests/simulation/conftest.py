"""Scenes for tests: each comes to rest and is closed after the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from tests.simulation.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Iterator


class MakeScene(Protocol):
    """Makes a scene of other than the usual sizes."""

    def __call__(self, **how: object) -> Scene:
        """See Scene."""
        ...


@pytest.fixture
def make_scene() -> Iterator[MakeScene]:
    """Scenes of any size."""
    made: list[Scene] = []

    def make(**how: object) -> Scene:
        scene = Scene(**how)  # type: ignore[arg-type]  # as of Scene
        made.append(scene)
        return scene

    yield make
    for scene in made:
        scene.rest()
        scene.simulation.close()


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    """One worker with room for 16 small pages, and two clients, all on one host."""
    return make_scene(clients=2)
