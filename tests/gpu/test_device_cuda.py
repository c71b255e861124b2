"""The CUDA device passes the tests of the virtual one, with binaries and with PTX."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_runner import device, gpu_missing
from device_programs import ROUNDS, build_modules, build_program, run_program

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing())]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """The program, its modules, and the GPU's compute capability."""
    folder = tmp_path_factory.mktemp("device")
    with device() as gpu:
        sm = gpu.sm
    build_modules(folder / "binaries", sm)
    build_modules(folder / "ptx", 75, ptx=True)
    return build_program("device_test", folder / "device_test"), folder, sm


@pytest.mark.parametrize("name", ROUNDS)
def test_cuda(command: tuple[Path, Path, int], name: str) -> None:
    program, folder, sm = command
    shown = run_program(program, "cuda", name, ROUNDS[name], folder / "binaries", sm)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr


def test_ptx(command: tuple[Path, Path, int]) -> None:
    program, folder, _ = command
    shown = run_program(program, "cuda", "hand_offs", 100, folder / "ptx", "75ptx")
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr
