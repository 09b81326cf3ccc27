"""Import direction, what `import kvstore` may cost, and that every module can be imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.load_order import cycle, module_name
from tests.tidy.sources import PACKAGES, ROOT, Source, is_within, sources

HEAVY = {"aiohttp", "gguf", "mooncake", "numpy", "rich", "torch", "transformers", "typer", "uvloop"}

LOADED = "import sys, kvstore; print(*{name.partition('.')[0] for name in sys.modules})"

ENGINES = ("lmcache", "sglang", "vllm")
IMPORT_ALL = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def modules() -> list[Source]:
    """Every module of ours that is not a program."""
    return [each for each in sources(PACKAGES) if not each.path.endswith("__main__.py")]


def loads_an_engine(source: Source) -> bool:
    return any(is_within(name, each) for _, name in source.references() for each in ENGINES)


def test_imports_go_downhill() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = run(str(program), "--no-logo", "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_kvstore_is_light() -> None:
    done = run(sys.executable, "-P", "-c", LOADED)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "kvstore" in loaded
    assert not loaded & HEAVY


def test_every_module_can_be_imported_first() -> None:
    assert cycle(modules()) == []
    # An engine is not there: tests/engines imports what loads one.
    names = [module_name(each) for each in modules() if not loads_an_engine(each)]
    done = run(sys.executable, "-P", "-W", "error", "-c", IMPORT_ALL, *names)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (
            {"p/__init__.py": "", "p/a.py": "from p import b", "p/b.py": "import p.a"},
            {"p.a", "p.b"},
        ),
        ({"p/a.py": "class C:\n    from q import x", "q.py": "from p.a import C"}, {"p.a", "q"}),
        ({"p/__init__.py": "import p.a", "p/a.py": "import q", "q.py": "import p.b"}, {"p", "q"}),
        ({"p/__init__.py": "from p.a import x", "p/a.py": "from p import b", "p/b.py": ""}, set()),
        ({"a.py": "if TYPE_CHECKING:\n    import b", "b.py": "def f():\n    import a"}, set()),
        ({"a.py": "import b", "b.py": "async def f():\n    import a"}, set()),
    ],
)
def test_modules_that_load_each_other_are_found(texts: dict[str, str], found: set[str]) -> None:
    cycled = set(cycle(Source(path, text) for path, text in texts.items()))
    assert found <= cycled
    assert bool(found) == bool(cycled)


@pytest.mark.parametrize("server", ["master", "workers"])
def test_a_server_refuses_to_start_beside_a_foreign_package(server: str, tmp_path: Path) -> None:
    intruder = tmp_path / "policies" / "__init__.py"
    intruder.parent.mkdir()
    intruder.touch()
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"from {server}.__main__ import main; sys.exit(main())"
    )
    done = run(sys.executable, "-P", "-c", program)
    assert done.returncode != 0
    assert "package 'policies'" in done.stderr
    assert str(intruder) in done.stderr
