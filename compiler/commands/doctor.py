"""`atsc doctor`: what this machine has, and what is missing for what."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atsc.compiler.commands.console import Console, format_size
from atsc.compiler.errors import CodegenError
from atsc.compiler.isa import ISA_FLAGS, platform_name
from atsc.compiler.version import atsc_version
from atsc.targets.detect import detect
from atsc.targets.target import Target

LEAST_ISA, LEAST_SM = "x86-64-v3", 75
PACKAGES = {
    "numpy": "numpy",
    "onnx": "onnx",
    "onnx-ir": "onnx_ir",
    "onnxscript": "onnxscript",
    "jinja2": "jinja2",
    "gguf": "gguf",
    "tokenizers": "tokenizers",
    "onnxruntime": "onnxruntime",
    "ziglang": "ziglang",
    "cuda-bindings": "cuda.bindings",
    "apache-tvm": "tvm",
}
"""Distribution -> the module that it brings."""
NEEDED = "compile", "run"
"""Features without which the exit code is 1."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that atsc does, and what it lacks here: what is missing -> how to get it."""

    name: str
    missing: dict[str, str]


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found; empty and None where there is nothing."""

    target: Target
    available_bytes: int
    cuda_driver: str
    compiler: str
    zig: str
    cuda_compiler: str
    packages: dict[str, str]
    cache_dir: Path
    cache_bytes: int
    cache_is_writable: bool


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "doctor", help="what this machine has and lacks", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it; exit with 0 if models can be compiled and run here."""
    found = examine()
    features = features_of(found)
    ok = all(not feature.missing for feature in features if feature.name in NEEDED)
    document = {
        "ok": ok,
        "atsc": atsc_version(),
        "python": platform.python_version(),
        "platform": platform_name(),
        **dataclasses.asdict(found),
        "cache_dir": str(found.cache_dir),
        "features": [
            {"name": feature.name, "ok": not feature.missing, "missing": feature.missing}
            for feature in features
        ],
    }
    console.result(document, _text(found, features))
    return 0 if ok else 1


def examine() -> Findings:
    """Look at this machine."""
    from atsc.codegen.toolchain import cache_dir
    from atsc.codegen.zig import find_zig

    zig = find_zig()
    return Findings(
        target=detect(),
        available_bytes=_available_bytes(),
        cuda_driver=_cuda_driver(),
        compiler=_compiler(),
        zig=zig[1] if zig else "",
        cuda_compiler=_cuda_compiler(),
        packages={name: _version(name, module) for name, module in PACKAGES.items()},
        cache_dir=cache_dir(),
        cache_bytes=_folder_bytes(cache_dir()),
        cache_is_writable=_is_writable(cache_dir()),
    )


def features_of(found: Findings) -> list[Feature]:
    """What works with what was found, the most important first."""
    target, levels = found.target, list(ISA_FLAGS)
    isa: dict[str, str] = {}
    if target.isa not in levels or levels.index(target.isa) < levels.index(LEAST_ISA):
        isa = {f"a CPU with {LEAST_ISA} (AVX2); this one is {target.isa}": "use another machine"}
    compiler: dict[str, str] = {}
    if not found.compiler and not found.zig:
        compiler = {"a C++ compiler": "apt install g++, or pip install 'atsc[zig]'"}
    if not found.cache_is_writable:
        compiler[f"a cache folder that can be written, not {found.cache_dir}"] = (
            "set ATSC_CACHE_DIR to one"
        )
    cuda = {} if found.cuda_compiler else {"NVRTC or nvcc": "pip install 'atsc[cuda]'"}

    def lacks(extra: str, *names: str) -> dict[str, str]:
        return {name: f"pip install 'atsc[{extra}]'" for name in names if not found.packages[name]}

    importer = lacks("compiler", "numpy", "onnx", "onnx-ir", "onnxscript", "jinja2")
    text = lacks("run", "numpy", "tokenizers")
    return [
        Feature("compile", {**compiler, **importer}),
        Feature("run", {**isa, **text}),
        Feature("chat", {**isa, **text, **lacks("run", "jinja2")}),
        Feature("convert GGUF", lacks("compiler", "numpy", "onnx", "gguf", "tokenizers")),
        Feature("verify", {**isa, **importer, **lacks("verify", "onnxruntime")}),
        Feature("--toolchain zig", lacks("zig", "ziglang")),
        Feature("rare operators", lacks("tvm", "apache-tvm")),
        Feature("compile for a GPU", {**compiler, **importer, **cuda}),
        Feature("run on a GPU", {**isa, **text, **_gpu_lacks(found)}),
    ]


def _gpu_lacks(found: Findings) -> dict[str, str]:
    if not found.cuda_driver:
        return {"the NVIDIA driver (libcuda.so.1)": "install it, or run on the CPU"}
    if not found.target.gpu:
        return {"a GPU that the driver shows": "nvidia-smi says why, or run on the CPU"}
    if found.target.sm < LEAST_SM:
        name = f"a GPU of sm_{LEAST_SM} or later; this one is sm_{found.target.sm}"
        return {name: "run on the CPU"}
    return {}


def _compiler() -> str:
    from atsc.codegen.toolchain import find_compiler

    try:
        return find_compiler("system").version
    except CodegenError:
        return ""


def _cuda_compiler() -> str:
    try:
        from atsc.codegen.nvrtc import find_cuda_compiler

        lines = find_cuda_compiler().version.strip().splitlines()
    except (CodegenError, ImportError):  # no jinja2, which codegen renders kernels with
        return ""
    return lines[-1] if lines else ""


def _cuda_driver() -> str:
    """The CUDA version that the driver serves."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _version(distribution: str, module: str) -> str:
    """Of an installed package whose module can be found, else empty."""
    try:
        if importlib.util.find_spec(module) is None:
            return ""
        return importlib.metadata.version(distribution)
    except ImportError:  # a parent of the module, or the distribution, is not there
        return ""


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        lines = meminfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(found, 0)) << 10


def _is_writable(folder: Path) -> bool:
    """Or can be made, in the nearest of its parents that is there."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _folder_bytes(folder: Path) -> int:
    """Of all files; those that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return total


def _text(found: Findings, features: list[Feature]) -> str:
    target = found.target
    packages = ", ".join(f"{name} {version}" for name, version in found.packages.items() if version)
    gpu = "none"
    if target.gpu:
        gpu = f"{target.gpu_model}, sm_{target.sm}, {format_size(target.vram_bytes)}"
    rows = [
        ("CPU", f"{target.cpu_model}: {', '.join([target.isa, *target.features])}"),
        ("cores", f"{target.num_cores}, {target.num_threads} threads" + _limit(target)),
        (
            "memory",
            f"{format_size(target.ram_bytes)}, {format_size(found.available_bytes)} available",
        ),
        ("GPU", gpu),
        ("driver", found.cuda_driver or "none"),
        ("compiler", found.compiler or "none"),
        ("zig", found.zig or "none"),
        ("CUDA compiler", found.cuda_compiler or "none"),
        ("packages", packages or "none"),
        ("cache", f"{found.cache_dir}, {format_size(found.cache_bytes)}"),
    ]
    lines = [f"atsc {atsc_version()}, Python {platform.python_version()}, {platform_name()}", ""]
    for name, text in rows:
        lines += _wrapped(name, text)
    lines.append("")
    for feature in features:
        lines += _wrapped(feature.name, _missing(feature))
    return "\n".join(lines)


def _wrapped(name: str, text: str) -> list[str]:
    line, indent = f"{name:<18} {text}", 19 * " "
    return textwrap.wrap(line, 98, subsequent_indent=indent, break_on_hyphens=False)


def _limit(target: Target) -> str:
    return f", limited to {target.cpu_limit:g} CPUs' time" if target.cpu_limit else ""


def _missing(feature: Feature) -> str:
    """`ok`, or what to get for what; equal advice once."""
    by_advice: dict[str, list[str]] = {}
    for name, advice in feature.missing.items():
        by_advice.setdefault(advice, []).append(name)
    parts = [f"{', '.join(names)} ({advice})" for advice, names in by_advice.items()]
    return f"needs {'; '.join(parts)}" if parts else "ok"
