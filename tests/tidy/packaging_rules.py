"""What the folders, the wheel and the pins of the distribution must look like."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from typing import TYPE_CHECKING, Final

from tests.tidy.sources import PACKAGES, ROOT, Source

if TYPE_CHECKING:
    from pathlib import Path

TEST_KINDS: Final = ("unit", "contract", "simulation", "cluster", "engines", "browser", "tidy")
BUILD_S_MAX: Final = 120


def bare_folders(root: Path) -> list[str]:
    """Name the folders with Python files below our packages and tests that lack a docstring.

    A folder without `__init__.py` is a namespace package, which a stranger's folder could join.
    """
    folders = {path.parent for top in (*PACKAGES, "tests") for path in (root / top).rglob("*.py")}
    return sorted(
        folder.relative_to(root).as_posix() for folder in folders if not _introduced(folder)
    )


def _introduced(folder: Path) -> bool:
    init = folder / "__init__.py"
    return init.is_file() and ast.get_docstring(ast.parse(init.read_text())) is not None


def silent_files(source: Source) -> list[str]:
    """Name a file whose module docstring is missing."""
    return [] if ast.get_docstring(source.tree) else [f"{source.path}: no module docstring"]


def misnamed_tests(root: Path) -> list[str]:
    """Name test folders of no known kind, and test files not called after what they test.

    A test folder called after a package would be imported in its place.
    """
    tests = root / "tests"
    kinds = [path for path in tests.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    found = [
        f"tests/{path.name}: not a kind of test" for path in kinds if path.name not in TEST_KINDS
    ]
    subjects = "|".join((*PACKAGES, *TEST_KINDS, "benchmarks"))
    pattern = re.compile(rf"test_({subjects})_\w+\.py")
    found += [
        f"{path.relative_to(root).as_posix()}: want test_<package>_<module>.py"
        for path in sorted(tests.rglob("test_*.py"))
        if not pattern.fullmatch(path.name)
    ]
    return found


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the tree in `folder`, with bait that must stay out."""
    tree = folder / "tree"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for bait in ("tests", "benchmarks", "deploy"):
        (tree / bait).mkdir()
        (tree / bait / "__init__.py").write_text('"""Must not be in the wheel."""\n')
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    done = subprocess.run(
        [*command, str(folder / "dist"), str(tree)],
        capture_output=True,
        text=True,
        timeout=BUILD_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def wheel_members(wheel: Path) -> list[str]:
    """List the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def required_names() -> set[str]:
    """Return the names of everything that pyproject.toml asks for on an ordinary machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = ("cpu", "demo", "dev", "etcd", "tracing")
    wanted = [*project["dependencies"], *(each for name in ours for each in extras[name])]
    return {normal_name(re.split(r"[<>=!~ \[;]", each)[0]) for each in wanted}


def names_beside_engines() -> set[str]:
    """Return the names that kvharbor itself needs in an engine's environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {normal_name(re.split(r"[<>=!~ \[;]", each)[0]) for each in project["dependencies"]}


def pinned_names(file: str = "constraints.txt") -> set[str]:
    """Return the names that a file of constraints pins to one release."""
    lines = (ROOT / file).read_text().splitlines()
    return {normal_name(line.partition("==")[0]) for line in lines if "==" in line}


def normal_name(name: str) -> str:
    """Spell a distribution's name the way PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
