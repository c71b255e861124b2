"""Plan folders for a GPU, of any size, that no runtime can load: a decoder by arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from small_plan import write_plan

from atsc.codegen.device_plan import DeviceRequest, plan_device
from atsc.codegen.device_section import device_section
from atsc.compiler import plan
from atsc.passes.annotate import Annotation, Load, rates_of
from atsc.passes.ladder import FixedBytes
from atsc.passes.placement import Link
from atsc.passes.retarget import costs_of
from atsc.targets.target import resolve

MIB = 1 << 20
PROMPT_SHARE = 0.9


@dataclass(frozen=True)
class Shape:
    """A decoder of int4 matrices with fp16 scales a block of 32."""

    layers: int = 3
    hidden: int = 256
    inner: int = 512
    kv_width: int = 64
    vocabulary: int = 2048
    context: int = 512
    chunk: int = 64
    window: int = 0


def matrix(shape: Shape, name: str, part: str, layer: int | None, n: int, k: int) -> plan.Unit:
    num_bytes = n * k * 18 // 32
    rows = 1 if part == "head" else shape.chunk
    decode, prefill = (
        plan.Work((2 * m * n * k, 0), (num_bytes + 4 * m * (n + k), 8 * m * n)) for m in (1, rows)
    )
    cost = plan.Cost("weights", part, layer, num_bytes, 4 * k, decode, prefill)
    return plan.Unit(name, (f"{name}/norm", name), "int4b32", num_bytes, 0, "ram", 0, cost)


def cache(shape: Shape, layer: int) -> plan.Unit:
    width, load = 4 * shape.kv_width, Load(shape.context, shape.chunk)

    def work(rows: int) -> plan.Work:
        tokens = load.position(rows) + rows
        flops = 4 * rows * shape.hidden
        return plan.Work((flops * tokens,), (width * tokens,), (flops,), (width,))

    num_bytes = width * shape.context
    cost = plan.Cost(
        *("kv cache", "attention", layer, num_bytes, 4 * (shape.hidden + 2 * shape.kv_width)),
        decode=work(1),
        prefill=work(shape.chunk),
        cache=plan.Cache(width, shape.window),
    )
    return plan.Unit(f"layer {layer} attention", ("attention",), "kv-cache", 0, 0, "ram", 0, cost)


def units_of(shape: Shape) -> Iterator[plan.Unit]:
    hidden, inner = shape.hidden, shape.inner
    yield plan.Unit("shared", (), "f32", 4096, 0, "ram", 0)
    embedded = plan.Work((0,), (8 * hidden,))
    size = shape.vocabulary * hidden * 18 // 32
    cost = plan.Cost("weights", "embedding", None, size, 0, embedded, embedded)
    yield plan.Unit("embed", ("embed",), "int4b32", size, 0, "ram", 0, cost)
    for layer in range(shape.layers):
        width = hidden + 2 * shape.kv_width
        yield matrix(shape, f"layer {layer} qkv", "attention", layer, width, hidden)
        yield cache(shape, layer)
        yield matrix(shape, f"layer {layer} o", "attention", layer, hidden, hidden)
        yield matrix(shape, f"layer {layer} gate", "ffn", layer, inner, hidden)
        yield matrix(shape, f"layer {layer} up", "ffn", layer, inner, hidden)
        yield matrix(shape, f"layer {layer} down", "ffn", layer, hidden, inner)
    yield matrix(shape, "head <&>", "head", None, shape.vocabulary, hidden)


def write_gpu_plan(
    directory: Path,
    shape: Shape | None = None,
    *,
    target: str = "laptop-rtx3060-6g",
    vram_bytes: int | None = 306 * MIB,
    policy: str = "tensor",
) -> plan.Manifest:
    """A plan for a target's GPU; for a CPU alone with `vram_bytes` None."""
    shape = shape or Shape()
    manifest = write_plan(directory)
    units, end = [], 0
    for unit in units_of(shape):
        units.append(dataclasses.replace(unit, offset=end))
        end += -(-unit.bytes // plan.WEIGHTS_ALIGNMENT) * plan.WEIGHTS_ALIGNMENT
    context_length = max(manifest.model.model_context_length, shape.context)
    manifest = dataclasses.replace(
        manifest,
        model=dataclasses.replace(manifest.model, model_context_length=context_length),
        units=tuple(units),
        files={**manifest.files, "weights.bin": plan.File(end, "0" * 64)},
        memory=plan.Memory(end, 4 * shape.kv_width * shape.context * shape.layers, MIB, MIB),
        options=plan.Options(shape.context, shape.chunk, 4, 8, policy="cpu"),
    )
    if vram_bytes is not None:
        manifest = _placed(manifest, target, vram_bytes, policy)
    plan.save(manifest, directory)
    return manifest


def _placed(manifest: plan.Manifest, name: str, vram_bytes: int, policy: str) -> plan.Manifest:
    target, options = resolve(name), manifest.options
    rates = rates_of(target)
    found = costs_of(manifest, rates)
    link = Link(rates.hand_off_ns, 1e9 / rates.link_bytes_per_s)
    annotation = Annotation(found.units, found.indices, link, link, found.cpu_share)
    fixed = FixedBytes(target.gpu_context_bytes, MIB, 2 * MIB, MIB)
    request = DeviceRequest(target.gpu, policy, vram_bytes, MIB, PROMPT_SHARE, options.chunk)
    tables = plan_device(request, annotation, fixed, None, len(manifest.units))
    load = Load(options.ctx, options.chunk)
    device = device_section(tables, annotation, fixed, target, load, PROMPT_SHARE)
    costs = dict(zip(found.indices, found.units, strict=True))
    units = []
    for index, unit in enumerate(manifest.units):
        if unit.cost:
            times = (costs[index].decode, costs[index].prefill)
            decode, prefill = (plan.Times(t.cpu_ns, t.gpu_ns, t.transfer_ns) for t in times)
            timed = dataclasses.replace(unit.cost, decode_times=decode, prefill_times=prefill)
            here = "vram" if device.rungs[-1].on_device[index] == "1" else "ram"
            unit = dataclasses.replace(unit, cost=timed, residency=here)
        units.append(unit)
    options = dataclasses.replace(options, policy=policy)
    return dataclasses.replace(manifest, units=tuple(units), options=options, device=device)
