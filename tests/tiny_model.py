"""The model of runtime/tiny/tiny_plan.cc in numpy, its weights, and a plan folder of it."""

from __future__ import annotations

import hashlib
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atsc.codegen import toolchain
from atsc.compiler import plan as manifests
from atsc.compiler.plan_json import Json

WIDTH, VOCAB, HEADS, HEAD_SIZE = 16, 32, 2, 8
CONTEXT, CHUNK, MAX_LOGIT_ROWS, WINDOW, RING = 96, 12, 10, 4, 15
EOS, GATE_TOKEN = 30, 31
OFFSETS = (0, 4096, 8192, 12288)
UNIT_NAMES = ("table", "w1", "w2", "head")
SOURCE = Path(__file__).parent / "runtime" / "tiny" / "tiny_plan.cc"
RUNTIME = Path(__file__).parents[1] / "runtime"

F32Array = NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    table: F32Array
    w1: F32Array
    w2: F32Array
    head: F32Array

    def parts(self) -> list[bytes]:
        return [part.tobytes() for part in (self.table, self.w1, self.w2, self.head)]


def make_weights() -> Weights:
    rng = np.random.default_rng(7)
    shapes = ((VOCAB, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (VOCAB, WIDTH))
    return Weights(*(rng.standard_normal(shape, np.float32) for shape in shapes))


def reference(ids: list[int], weights: Weights, factor: float = 1) -> F32Array:
    """Logits after each token, [len(ids), VOCAB]."""
    x = weights.table[ids]
    for matrix, window in ((weights.w1, 0), (weights.w2, WINDOW)):
        n = x / (1 + np.abs(x).max(axis=1, keepdims=True))
        x = _attention(n @ matrix.T + x, window)
    return np.float32(factor) * (x @ weights.head.T)


def _attention(x: F32Array, window: int) -> F32Array:
    rows = len(x)
    heads = x.reshape(rows, HEADS, HEAD_SIZE)
    kept = heads.astype(np.float16).astype(np.float32)
    scores = np.einsum("mhd,thd->hmt", heads, kept)
    row, token = np.arange(rows)[:, None], np.arange(rows)[None, :]
    visible = (token <= row) & ((token > row - window) | (window == 0))
    scores = np.where(visible, scores, -np.inf)
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    mixed: F32Array = x + np.einsum("hmt,thd->mhd", chances, kept).reshape(rows, WIDTH)
    return mixed


def objects(
    plan_id: str = "tiny", factor: float = 1, *, rungs: int = -1, flags: tuple[str, ...] = ()
) -> list[Path]:
    """The compiled runtime and the tiny plan's tables and kernels."""
    crcs = ",".join(f"{zlib.crc32(part)}u" for part in make_weights().parts())
    defines = (
        f"-DTINY_CRCS={crcs}",
        f'-DTINY_PLAN_ID="{plan_id}"',
        f"-DTINY_FACTOR={factor:.1f}f",
        f"-DTINY_RUNGS={rungs}",
    )
    units = [
        toolchain.Unit(source.stem, source.read_text(), ("-fexceptions", *flags))
        for source in sorted((RUNTIME / "src").glob("*.cc"))
    ]
    units.append(toolchain.Unit("tiny_plan", SOURCE.read_text(), (*defines, *flags)))
    return toolchain.compile_units(units)


def build_plan(
    directory: Path,
    plan_id: str = "tiny",
    factor: float = 1,
    *,
    rungs: int = -1,
    link_flags: tuple[str, ...] = (f"-Wl,--version-script={SOURCE.with_name('exports.map')}",),
) -> Path:
    """A whole plan folder; for the virtual device if `rungs` is not negative."""
    directory.mkdir(parents=True)
    parts = make_weights().parts()
    image = bytearray(OFFSETS[-1] + len(parts[-1]))
    for offset, part in zip(OFFSETS, parts, strict=True):
        image[offset : offset + len(part)] = part
    (directory / "weights.bin").write_bytes(image)
    compiled = objects(plan_id, factor, rungs=rungs)
    toolchain.link_library(compiled, directory / "libplan.so", link_flags)
    units = tuple(
        manifests.Unit(name, (name,), "f32", len(part), offset, "ram", zlib.crc32(part))
        for name, offset, part in zip(UNIT_NAMES, OFFSETS, parts, strict=True)
    )
    save_manifest(directory, plan_id, units, {"gpu": "virtual"} if rungs >= 0 else {})
    return directory


def save_manifest(
    directory: Path,
    plan_id: str,
    units: tuple[manifests.Unit, ...] = (),
    target: Mapping[str, Json] | None = None,
) -> None:
    """plan.json for whatever files the folder holds."""
    files = {
        path.relative_to(directory).as_posix(): manifests.File(
            path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != manifests.MANIFEST
    }
    manifest = manifests.Manifest(
        plan_id=plan_id,
        atsc_version="0",
        platform="linux-x86_64",
        isa="x86-64-v3",
        library="libplan.so",
        weights="weights.bin",
        model=manifests.Model("tiny", VOCAB, CONTEXT, 1, (EOS,), ()),
        options=manifests.Options(CONTEXT, CHUNK, None, None),
        memory=manifests.Memory(14336, 0, 0),
        units=units,
        files=files,
        target=target or {},
    )
    manifests.save(manifest, directory)


def build_program(
    sources: list[Path], output: Path, flags: tuple[str, ...], rungs: int = -1
) -> None:
    """An executable of some sources and the tiny plan, everything with the same flags."""
    compiler = toolchain.find_compiler()
    includes = [f"-I{folder}" for folder in toolchain.INCLUDE_DIRS]
    command = [
        *(*compiler.command, "-std=c++20", "-O1", *flags, *includes, *map(str, sources)),
        *(*map(str, objects(flags=flags, rungs=rungs)), "-pthread", "-o", str(output)),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
