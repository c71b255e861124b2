"""The CUDA device without a GPU: on an emulated driver, without any, and its declarations."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest
from device_programs import (
    ROUNDS,
    SANITIZED_ROUNDS,
    SANITIZERS,
    SOURCES,
    build_emulated_driver,
    build_program,
    run_program,
    sanitizer_missing,
)

from atsc.codegen.toolchain import INCLUDE_DIRS

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program("device_test", tmp_path_factory.mktemp("device") / "device_test")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_emulated_driver(tmp_path_factory.mktemp("emulated"))


def _expect_fine(
    program: Path, driver: Path, name: str, rounds: int, env: dict[str, str] | None = None
) -> None:
    environment = {"LD_LIBRARY_PATH": str(driver), **(env or {})}
    shown = run_program(program, "cuda", name, rounds, driver, 90, env=environment)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), f"{name}: {shown.stderr[-4000:]}"
    assert "WARNING" not in shown.stderr


@pytest.mark.parametrize("name", ROUNDS)
def test_on_emulated_driver(program: Path, emulated: Path, name: str) -> None:
    _expect_fine(program, emulated, name, min(ROUNDS[name], 300))


def test_driver_that_refuses_waits_in_graphs(program: Path, emulated: Path) -> None:
    _expect_fine(program, emulated, "no_graphs", 100, {"EMULATED_WITHOUT_WAITS": "1"})


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    flags = SANITIZERS[sanitizer]
    if sanitizer_missing(flags, tmp_path):
        pytest.skip(f"the compiler cannot build for {flags[0]} here")
    program = build_program("device_test", tmp_path / "device_test", flags)
    driver = build_emulated_driver(tmp_path, flags)
    for name, rounds in SANITIZED_ROUNDS.items():
        # A GPU that was released reads what the host may be writing, and so does this driver.
        if (sanitizer, name) != ("thread", "cancel"):
            _expect_fine(program, driver, name, rounds)


def _refusal(program: Path, folder: Path, version: int) -> str:
    """What opening a GPU says with a driver of some CUDA version that finds none."""
    library = folder / "libcuda.so.1"
    source = SOURCES / "fake_driver.cc"
    built = run_program(
        "c++", "-shared", "-fPIC", f"-DFAKE_VERSION={version}", source, "-o", library
    )
    assert built.returncode == 0, built.stderr
    shown = run_program(program, "cuda", "order", 1, env={"LD_LIBRARY_PATH": str(folder)})
    assert shown.returncode == 1
    (line,) = shown.stderr.splitlines()
    return line


def test_driver_too_old(program: Path, tmp_path: Path) -> None:
    line = _refusal(program, tmp_path, 11040)
    assert "supports CUDA 11.4, but atsc needs 12.0 or later" in line


def test_no_gpu(program: Path, tmp_path: Path) -> None:
    assert "finds no GPU" in _refusal(program, tmp_path, 12040)


def test_no_driver(program: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is an NVIDIA driver here")
    except OSError:
        pass
    shown = run_program(program, "cuda", "order", 1)
    assert shown.returncode == 1
    (line,) = shown.stderr.splitlines()
    assert line.startswith("failed: there is no NVIDIA driver: install one (libcuda.so.1")


def test_declarations_agree_with_cuda_h() -> None:
    nvcc = shutil.which("nvcc")
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if nvcc:
        lines = run_program(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull).stderr.splitlines()
        tops = [line.split("TOP=")[1] for line in lines if "TOP=" in line]
        folders += [Path(top) / "include" for top in tops]
    found = [folder for folder in folders if (folder / "cuda.h").is_file()]
    if not found:
        pytest.skip("there is no CUDA toolkit here, so no cuda.h")
    includes = [f"-I{folder}" for folder in (*INCLUDE_DIRS, found[0])]
    source = SOURCES / "driver_abi.cc"
    shown = run_program("c++", "-std=c++20", "-fsyntax-only", *includes, source)
    assert shown.returncode == 0, shown.stderr
