"""`atsc profile`: a machine's rates, measured with the kernels that plans are made of.

A probe model, large int4 matrices in more layers than caches hold, goes through the pipeline like
any other; its runtime times one matrix at a time, cold, for one row (which the memory limits) and
for a chunk (which arithmetic limits). Other machines can then compile for this one by its file.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np

from atsc.compiler.compilation import Compilation, CompileOptions
from atsc.compiler.driver import Observer, Stages, build
from atsc.compiler.ir import (
    LOGIT_ROWS,
    TOKENS,
    ArraySource,
    BlockFormat,
    DType,
    Graph,
    ModelInfo,
    Node,
    TensorType,
    Value,
    Weight,
)
from atsc.compiler.profiling import MeasuredTimer, measuring
from atsc.passes.annotate import Annotation
from atsc.passes.placement import Side
from atsc.targets.target import Target, resolve

HIDDEN = 4096
INNER = 16384
LAYERS = 10
"""Ten pairs of matrices take 0.75 GB, more than caches hold."""
VOCAB = 4096
CHUNK = 512
_FORMAT = BlockFormat(4, 32, False)


def profile_machine(
    scratch: Path, threads: int | None = None, observer: Observer | None = None
) -> Target:
    """This machine as a Target with measured rates.

    Args:
        scratch: a folder with room for about 1.5 GB; nothing stays there.
        threads: of the CPU; None takes one a core.
        observer: told of stages and progress.

    Raises:
        CodegenError: there is no compiler.
        DeviceError: the GPU cannot be used.
    """
    target = resolve("auto")
    options = CompileOptions(model=Path("probe"), chunk=CHUNK, threads=threads)
    stages = Stages(observer)
    built = build(options, target, probe_graph(), CHUNK, stages)
    with tempfile.TemporaryDirectory(prefix=".atsc-profile-", dir=scratch) as folder:
        profile = Path(folder) / "probe.atsplan"
        with measuring(built, profile, stages.progress) as timer:
            return stages.run("measure", lambda: _measured(built, timer))


def probe_graph() -> Graph:
    """embed, then pairs of linears with a residual, then a head; no attention."""
    rng = np.random.default_rng(0)
    ids = TensorType(DType.I32, (TOKENS,))
    values = {"ids": ids, "x0": TensorType(DType.F32, (TOKENS, HIDDEN))}
    weights = [_matrix(rng, "embedding", VOCAB, HIDDEN), _matrix(rng, "head", VOCAB, HIDDEN)]
    nodes = [Node("embed", "embed", ("ids", "embedding"), ("x0",))]

    def emit(op: str, reads: tuple[str, ...], name: str, dtype: DType, width: int) -> None:
        rows = LOGIT_ROWS if name in ("last", "last_q8", "logits") else TOKENS
        values[name] = TensorType(dtype, (rows, width))
        attrs = {"accuracy_level": 4} if op == "linear" else {}
        nodes.append(Node(op, name, reads, (name,), attrs))

    wide, narrow = _matrix(rng, "up", INNER, HIDDEN), _matrix(rng, "down", HIDDEN, INNER)
    for i in range(LAYERS):
        weights += [dataclasses.replace(m, name=f"{m.name}{i}") for m in (wide, narrow)]
        emit("quantize", (f"x{i}",), f"x{i}_q8", DType.Q8, HIDDEN)
        emit("linear", (f"x{i}_q8", f"up{i}"), f"y{i}", DType.F32, INNER)
        emit("quantize", (f"y{i}",), f"y{i}_q8", DType.Q8, INNER)
        reads = (f"y{i}_q8", f"down{i}", "", "", f"x{i}")
        emit("linear", reads, f"x{i + 1}", DType.F32, HIDDEN)
    emit("select_rows", (f"x{LAYERS}",), "last", DType.F32, HIDDEN)
    emit("quantize", ("last",), "last_q8", DType.Q8, HIDDEN)
    emit("linear", ("last_q8", "head"), "logits", DType.F32, VOCAB)
    return Graph(
        info=ModelInfo("probe", VOCAB, CHUNK),
        inputs=(Value("ids", ids),),
        outputs=(Value("logits", values["logits"]),),
        nodes=tuple(nodes),
        values=values,
        weights={weight.name: weight for weight in weights},
    )


def _matrix(rng: np.random.Generator, name: str, outputs: int, width: int) -> Weight:
    blocks = width // _FORMAT.block_size
    codes = rng.integers(0, 256, (outputs, blocks, _FORMAT.block_size // 2), np.uint8)
    scales = np.full((outputs, blocks), 2.0**-8, np.float16)
    parts = {"codes": ArraySource.of(codes), "scales": ArraySource.of(scales)}
    return Weight(name, (outputs, width), _FORMAT, parts)


def _measured(b: Compilation, timer: MeasuredTimer) -> Target:
    """Rates from the times of the up projections, which are like each other."""
    units = [i for i, unit in enumerate(b.parts.units) if unit.name.startswith("up")]
    num_bytes = b.parts.storage.units[units[0]].bytes
    operations = 2 * INNER * HIDDEN * CHUNK

    def time_ns(side: Side, rows: int) -> int:
        """The last answer knows all that were timed."""
        *_, found = (timer.unit_ns(unit, side, rows, 0) for unit in units)
        return found

    def rates(side: Side) -> tuple[float, float]:
        row, chunk = time_ns(side, 1), time_ns(side, CHUNK)
        return num_bytes / row * 1e9, operations / chunk * 1e9

    read, ops = rates(Side.HOST)
    found = dataclasses.replace(
        b.target, ram_read_bytes_per_s=read, cpu_ops_per_s=ops, source="measured"
    )
    if not b.target.gpu:
        return found
    vram, gpu_ops = rates(Side.GPU)
    link = timer.link_profile()
    to_gpu, to_cpu = timer.link(Side.GPU), timer.link(Side.HOST)
    fixed_bytes = timer.fixed_device_bytes()
    fixed = b.fixed_bytes(Annotation((), (), to_gpu, to_cpu, fixed_device_bytes=fixed_bytes))
    return dataclasses.replace(
        found,
        ram_read_shared_bytes_per_s=read * timer.cpu_share(),
        vram_read_bytes_per_s=vram,
        gpu_ops_per_s=gpu_ops,
        h2d_bytes_per_s=link["to_device_bytes_per_s"],
        hand_off_ns=(link["hand_off_to_device_ns"] + link["hand_off_to_host_ns"]) / 2,
        gpu_context_bytes=fixed.context,
    )
