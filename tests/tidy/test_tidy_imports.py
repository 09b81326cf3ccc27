"""Import direction, what `import kvstore` may cost, and that every module can be imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGES, ROOT, sources

HEAVY = {"aiohttp", "gguf", "mooncake", "numpy", "rich", "torch", "transformers", "typer", "uvloop"}

LOADED = "import sys, kvstore; print(*{name.partition('.')[0] for name in sys.modules})"

# Each import happens in a fork of an interpreter that has imported nothing of ours.
IMPORT_EACH = """
import importlib, os, sys, traceback
failed = False
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            print(f"importing {name} first:", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    failed |= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
sys.exit(failed)
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def module_names() -> list[str]:
    """Every module of ours that is not a program."""
    paths = [Path(source.path).with_suffix("") for source in sources(PACKAGES)]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


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
    done = run(sys.executable, "-P", "-W", "error", "-c", IMPORT_EACH, *module_names())
    assert done.returncode == 0, done.stderr


def test_a_module_that_cannot_be_imported_is_found() -> None:
    done = run(sys.executable, "-P", "-c", IMPORT_EACH, "kvstore", "kvstore.no_such_module")
    assert done.returncode == 1
    assert "importing kvstore.no_such_module first" in done.stderr


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
