"""The wheel holds every package, template, C++ source and target file."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("compiler", "passes", "codegen", "runtime", "targets")
DATA_SUFFIXES = {".h", ".cc", ".c", ".j2", ".toml", ".map", ".typed"}


@pytest.fixture(scope="module")
def setuptools_table() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]


def installed_name(folder: Path) -> str:
    """`compiler/ops` is atsc.compiler.ops; `compiler/api` is atsc itself."""
    parts = folder.relative_to(ROOT).parts
    return "atsc" if parts == ("compiler", "api") else ".".join(("atsc", *parts))


def test_every_package_is_listed(setuptools_table: Any) -> None:
    found = {
        installed_name(path.parent)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(setuptools_table["packages"])
    assert len(setuptools_table["packages"]) == len(found)


def test_every_folder_of_python_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_the_wheel_holds_what_git_holds(tmp_path: Path) -> None:
    """Built without the network, from a copy: a build writes into its tree."""
    pytest.importorskip("setuptools", minversion="77")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tree = tmp_path / "tree"
    sources = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if name.split("/")[0] not in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
            continue
        if source.is_symlink() or not source.is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(source.read_bytes())
        sources.append(Path(name))
    (tree / "README.md").touch()
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tree.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        Path("atsc", *path.parts[2:]) if path.parts[:2] == ("compiler", "api") else "atsc" / path
        for path in sources
        if path.parts[0] in FOLDERS and path.suffix in {*DATA_SUFFIXES, ".py"}
    }
    missing = {path.as_posix() for path in expected} - inside
    assert not missing
