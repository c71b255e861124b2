"""Writes a plan.json from a published shape alone, for `atsc simulate --target`.

    shape_plan.py llama3.1-70b --out plans/llama3.1-70b [--bits 4.5] [--ctx 4096] [--chunk 2048]

No weights, no kernels: nothing can load it. A unit has the work of its matrix, by arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from atsc.compiler import plan
from atsc.compiler.isa import platform_name
from atsc.passes.annotate import Load

# hidden, inner, layers, heads, heads of keys and values, head size, vocabulary
SHAPES = {
    "glm-z1-9b": (4096, 13696, 40, 32, 2, 128, 151552),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 128, 151936),
    "llama3.1-70b": (8192, 28672, 80, 64, 8, 128, 128256),
}
ALIGNMENT = plan.WEIGHTS_ALIGNMENT


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--bits", type=float, default=4.5, help="a weight, scales included")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plan.save(manifest(args.name, args.bits, Load(args.ctx, args.chunk)), args.out)
    print(args.out)


def manifest(name: str, bits: float, load: Load) -> plan.Manifest:
    """A plan for a CPU; `atsc simulate --target` places its units on a GPU."""
    hidden, inner, layers, heads, kv_heads, size, vocab = SHAPES[name]
    units = tuple(_units(name, bits, load))
    end = units[-1].offset + units[-1].bytes
    width = 4 * kv_heads * size
    # The widest moment of a layer: gate, up and their product beside the residual stream.
    arena = 4 * load.rows * (3 * inner + 2 * hidden + (heads + 2 * kv_heads) * size)
    hashed = {"libplan.so": plan.File(0, "0" * 64), "weights.bin": plan.File(end, "0" * 64)}
    return plan.Manifest(
        plan_id="",
        atsc_version="",
        platform=platform_name(),
        isa="x86-64-v3",
        library="libplan.so",
        weights="weights.bin",
        model=plan.Model(name, vocab, load.context, None, (), ()),
        options=plan.Options(load.context, load.chunk, 4, None),
        memory=plan.Memory(end, width * load.context * layers, arena, 16 << 20),
        units=units,
        files=hashed,
    )


def _units(name: str, bits: float, load: Load) -> Iterator[plan.Unit]:
    hidden, inner, layers, heads, kv_heads, size, vocab = SHAPES[name]
    end = 0

    def unit(label: str, num_bytes: int, cost: plan.Cost) -> plan.Unit:
        nonlocal end
        made = plan.Unit(label, (label,), f"{bits} bits", num_bytes, end, "ram", 0, cost)
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return made

    def matrix(label: str, part: str, layer: int | None, outputs: int, inputs: int) -> plan.Unit:
        num_bytes = int(outputs * inputs * bits / 8)
        rows = 1 if part == "head" else load.rows
        decode, prefill = (
            plan.Work(
                (2 * m * outputs * inputs, 0),
                (num_bytes + 4 * m * (outputs + inputs), 8 * m * outputs),
            )
            for m in (1, rows)
        )
        cost = plan.Cost("weights", part, layer, num_bytes, 4 * inputs, decode, prefill)
        return unit(label, num_bytes, cost)

    embedding = int(vocab * hidden * bits / 8)
    row = plan.Work((0,), (8 * hidden,))
    yield unit("embed", embedding, plan.Cost("weights", "embedding", None, embedding, 0, row, row))
    packed = (heads + 2 * kv_heads) * size
    for layer in range(layers):
        yield matrix(f"layer {layer} qkv", "attention", layer, packed, hidden)
        yield unit(f"layer {layer} attention", 0, _cache(layer, heads, kv_heads, size, load))
        yield matrix(f"layer {layer} o", "attention", layer, hidden, heads * size)
        yield matrix(f"layer {layer} gate", "ffn", layer, inner, hidden)
        yield matrix(f"layer {layer} up", "ffn", layer, inner, hidden)
        yield matrix(f"layer {layer} down", "ffn", layer, hidden, inner)
    yield matrix("head", "head", None, vocab, hidden)


def _cache(layer: int, heads: int, kv_heads: int, size: int, load: Load) -> plan.Cost:
    width = 4 * kv_heads * size  # fp16 keys and values of a token

    def work(rows: int) -> plan.Work:
        tokens, flops = load.position(rows) + rows, 4 * rows * heads * size
        causal = flops * tokens - 2 * heads * size * rows * (rows - 1)
        return plan.Work((causal,), (width * tokens,), (flops,), (width,))

    return plan.Cost(
        "kv cache",
        "attention",
        layer,
        width * load.context,
        4 * (heads + 2 * kv_heads) * size,
        decode=work(1),
        prefill=work(load.rows),
        cache=plan.Cache(width, 0),
    )


if __name__ == "__main__":
    main()
