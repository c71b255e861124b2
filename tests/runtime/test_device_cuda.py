"""What of the CUDA device can be tested without a GPU: what it says then, and its declarations."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from device_programs import SOURCES, build_program, run_program

from atsc.codegen.toolchain import INCLUDE_DIRS

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program("device_test", tmp_path_factory.mktemp("device") / "device_test")


def _refusal(program: Path, folder: Path, version: int) -> str:
    """What opening a GPU says with a driver of some CUDA version that finds none."""
    library = folder / "libcuda.so.1"
    source = SOURCES / "fake_driver.cc"
    built = run_program(
        "c++", "-shared", "-fPIC", f"-DFAKE_VERSION={version}", source, "-o", library
    )
    assert built.returncode == 0, built.stderr
    shown = subprocess.run(
        [program, "cuda", "order", "1"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
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
    assert line.startswith("failed: there is no NVIDIA driver (libcuda.so.1")


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
