"""What a plan takes of VRAM and of host memory, region by region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atsc.compiler.plan import Manifest, Unit


@dataclass(frozen=True, slots=True)
class Region:
    """One part of a memory."""

    key: str
    """As `measured` in plan.json names it."""
    name: str
    predicted_bytes: int
    measured_bytes: int | None = None


def vram_regions(manifest: Manifest) -> list[Region]:
    """Regions of VRAM for the whole budget; none for a plan for a CPU alone."""
    device = manifest.device
    if device is None:
        return []
    weights, caches = _resident_bytes(manifest.units)
    last = device.rungs[-1]
    sizes = {
        "weights": ("weights that live there", weights),
        "kv": ("KV caches", caches),
        "slots": (f"{last.num_slots} slots for copied weights", last.slot_bytes),
        "activations": ("activations, logits, scratch, tables", device.activations_bytes),
        "context": ("CUDA context" if device.kind == "cuda" else "context", device.context_bytes),
        "modules": ("kernels", device.modules_bytes),
        "headroom": ("kept free", device.headroom_bytes),
    }
    return _regions(sizes, manifest.measured.get("vram_bytes"))


def host_regions(manifest: Manifest) -> list[Region]:
    """Regions of host memory; what lives in VRAM leaves it once it is loaded."""
    memory, options = manifest.memory, manifest.options
    moved = sum(unit.bytes for unit in manifest.units if unit.residency == "vram")
    _, on_device = _resident_bytes(manifest.units)
    cache = f"KV cache, {options.sessions} x {options.ctx} tokens"
    sizes = {
        "weights": ("weights", memory.weights_bytes - moved),
        "kv": (cache, max(memory.kv_bytes - on_device, 0)),
        "arena": ("activations", memory.arena_bytes),
        "logits": ("logits", memory.logits_bytes),
    }
    return _regions(sizes, manifest.measured.get("ram_bytes"))


def total(regions: Iterable[Region]) -> Region:
    """All of them; measured where every region is."""
    regions = list(regions)
    measured = [r.measured_bytes for r in regions]
    known = [size for size in measured if size is not None]
    return Region(
        "total",
        "together",
        sum(r.predicted_bytes for r in regions),
        sum(known) if known and len(known) == len(regions) else None,
    )


def _resident_bytes(units: Iterable[Unit]) -> tuple[int, int]:
    """Bytes in VRAM of weights and of KV caches."""
    weights = caches = 0
    for unit in units:
        if unit.residency == "vram" and unit.cost:
            if unit.cost.kind == "kv cache":
                caches += unit.cost.device_bytes
            else:
                weights += unit.cost.device_bytes
    return weights, caches


def _regions(sizes: Mapping[str, tuple[str, int]], measured: object) -> list[Region]:
    """With what was measured: an object of bytes by region, where plan.json has one."""
    found = measured if isinstance(measured, Mapping) else {}
    return [
        Region(key, name, size, found[key] if isinstance(found.get(key), int) else None)
        for key, (name, size) in sizes.items()
    ]
