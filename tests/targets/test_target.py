"""Target files are read strictly, and `--target` finds what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from atsc.compiler.errors import UsageError
from atsc.targets.target import Target, builtin_names, load, resolve, save


def test_every_built_in_target_loads() -> None:
    assert "x86-64-v3" in builtin_names()
    for name in builtin_names():
        assert resolve(name).name == name


def test_a_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "my böx.toml"
    path.write_text(
        'isa = "x86-64-v3"\nnum_cores = 8\nram_read_bytes_per_s = 40e9\nfeatures = ["avx_vnni"]\n'
    )
    expected = Target(
        "my böx", "x86-64-v3", num_cores=8, ram_read_bytes_per_s=40e9, features=("avx_vnni",)
    )
    assert resolve(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("isa =", "no TOML"),
        ("num_cores = 2", "isa is ''; give one of x86-64,"),
        ('isa = "x86-64-v3"\nnum_core = 2', "unknown key num_core; did you mean num_cores?"),
        ('isa = "x86-64-v3"\nnum_cores = "2"', "num_cores is '2'; give int"),
        ('isa = "x86-64-v3"\nnum_cores = true', "num_cores is True; give int"),
        ('isa = "x86-64-v3"\nram_bytes = -1', "ram_bytes is negative"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean x86-64-v3\?"):
        resolve("x86_64-v3")
    with pytest.raises(UsageError, match="give one of auto, "):
        resolve("h9000")
    with pytest.raises(UsageError, match="No such file"):
        resolve(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("cores", "limit", "threads"),
    [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 64.0, 2), (0, None, 1)],
)
def test_default_threads(cores: int, limit: float | None, threads: int) -> None:
    target = Target("t", "x86-64-v3", num_cores=cores, cpu_limit=limit)
    assert target.default_threads == threads


def test_a_saved_target_is_read_back(tmp_path: Path) -> None:
    target = Target(
        "mäch", "x86-64-v4", 'a "CPU"', ("avx_vnni",), 8, ram_read_bytes_per_s=4.25e10, gpu="cuda"
    )
    save(target, tmp_path / "m.toml")
    assert load(tmp_path / "m.toml") == target
    assert [path.name for path in tmp_path.iterdir()] == ["m.toml"]
