"""Builds the C++ programs that test a device, and the GPU modules that they load."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from atsc.codegen import toolchain
from atsc.codegen.nvrtc import CudaUnit, compile_cuda
from atsc.codegen.render import render

SOURCES = Path(__file__).parent / "runtime" / "device"
RUNTIME_UNITS = (
    "cuda_driver",
    "cuda_graph",
    "cuda_launches",
    "cuda_rounds",
    "device",
    "device_cuda",
    "device_virtual",
    "platform_linux",
    "virtual_memory",
)

ROUNDS = {
    "order": 200,
    "hand_offs": 3000,
    "launches": 500,
    "synchronous": 500,
    "slots": 500,
    "cancel": 100,
    "swap": 200,
    "budget": 1,
    "pinning": 1,
    "mistakes": 1,
    "fault": 1,
    "clock": 20,
    "modules": 1,
}
"""Tests of device_test.cc that every device passes, and rounds of each."""
SANITIZED_ROUNDS = {name: min(rounds, 60) for name, rounds in ROUNDS.items()}
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def build_program(name: str, output: Path, flags: tuple[str, ...] = ()) -> Path:
    """An executable of `device/NAME.cc` and the device layer, everything with the same flags."""
    return _link(name, RUNTIME_UNITS, output, flags, ())


def build_emulated_driver(folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """A folder whose libcuda.so.1 runs the CUDA device's tests on the CPU, with their modules."""
    for name, kernel in {"handoff": "atsc_hand_off", "kernels": "test_affine"}.items():
        (folder / f"{name}.bin").write_text(kernel)
    _link("emulated_driver", ("platform_linux",), folder / "libcuda.so.1", flags, ("-shared",))
    return folder


def _link(
    name: str,
    runtime_units: tuple[str, ...],
    output: Path,
    flags: tuple[str, ...],
    link_flags: tuple[str, ...],
) -> Path:
    sources = [toolchain.RUNTIME_SOURCES / f"{stem}.cc" for stem in runtime_units]
    flags = ("-fexceptions", "-O1", f"-I{SOURCES}", *flags)
    headers = "".join(path.read_text() for path in sorted(SOURCES.glob("*.h")))
    main = f"{(SOURCES / f'{name}.cc').read_text()}\n#if 0\n{headers}\n#endif\n"
    units = [toolchain.Unit(path.stem, path.read_text(), flags) for path in sources]
    objects = toolchain.compile_units([*units, toolchain.Unit(name, main, flags)])
    compiler = toolchain.find_compiler()
    arguments = [*flags, *link_flags, *map(str, objects), "-pthread", "-ldl", "-o", str(output)]
    subprocess.run([*compiler.command, *arguments], check=True, capture_output=True, text=True)
    return output


def build_modules(folder: Path, sm: int, ptx: bool = False) -> Path:
    """A folder with the hand-off kernel and the test kernel for one compute capability."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "handoff": render("cuda/handoff__sm75.cu.j2", {}),
        "kernels": (SOURCES / "kernels.cu").read_text(),
    }
    units = [CudaUnit(name, text, sm, ptx) for name, text in texts.items()]
    for unit, path in zip(units, compile_cuda(units), strict=True):
        (folder / f"{unit.name}.bin").write_bytes(path.read_bytes())
    return folder


def sanitizer_missing(flags: tuple[str, ...], folder: Path) -> bool:
    """Whether the compiler cannot build, or this machine not run, programs with these flags."""
    probe = folder / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    built = run_program("c++", *flags, probe, "-o", folder / "probe")
    return built.returncode != 0 or run_program(folder / "probe").returncode != 0


def run_program(
    *command: object, timeout: float = 120, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program, with some more environment variables; its output is kept."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )
