"""A whole plan folder that no runtime can load: for tests of what comes before that."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

from atsc.compiler import isa, plan

UNITS = {"embed": b"\x01" * 5000, "layer 0 · qkv": b"\x02\x03" * 700, "head": bytes(range(256))}
LIBRARY = b"\x7fELF, as far as this test cares"


def write_plan(directory: Path) -> plan.Manifest:
    """A whole plan with three units and a tokenizer; its library is no library."""
    (directory / "tokenizer").mkdir(parents=True)
    units, weights = [], b""
    for name, data in UNITS.items():
        weights += bytes(-len(weights) % plan.WEIGHTS_ALIGNMENT)
        crc32 = zlib.crc32(data)
        units.append(plan.Unit(name, (name,), "int4b32", len(data), len(weights), "ram", crc32))
        weights += data
    contents = {
        "libplan.so": LIBRARY,
        "weights.bin": weights,
        "tokenizer/tokenizer.json": '{"ü": 1}'.encode(),
    }
    files = {}
    for name, data in contents.items():
        (directory / name).write_bytes(data)
        files[name] = plan.File(len(data), hashlib.sha256(data).hexdigest())
    manifest = plan.Manifest(
        plan_id="0123abcd",
        atsc_version="0.1.0",
        platform=isa.platform_name(),
        isa="x86-64",
        library="libplan.so",
        weights="weights.bin",
        model=plan.Model("tïny", 512, 2048, None, (2, 7), ("model.onnx",)),
        options=plan.Options(ctx=256, chunk=64, accuracy_level=None, threads=2),
        memory=plan.Memory(weights_bytes=8192, kv_bytes=4096, arena_bytes=1024),
        units=tuple(units),
        files=files,
        target={"name": "here", "cores": 2, "caches": [1, 2]},
    )
    plan.save(manifest, directory)
    return manifest
