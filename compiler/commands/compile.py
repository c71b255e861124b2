"""`atsc compile`: a model to a plan folder."""

from __future__ import annotations

import argparse
import pprint
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import (
    MOST_THREADS,
    Console,
    NotYet,
    at_least,
    counted,
    existing,
    format_size,
    parse_size,
)
from atsc.compiler.commands.inspect import predicted_speed
from atsc.compiler.commands.other_formats import refuse_other_formats
from atsc.compiler.errors import CodegenError, ModelError, UsageError

if TYPE_CHECKING:
    from atsc.compiler.plan import Manifest

_NO_TIERS = "plans keep everything in RAM and VRAM for now, so leave it out"


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "compile",
        help="compile a model to a plan",
        description=__doc__,
        epilog="As: atsc compile model.gguf --vram 6G --ctx 8192, which makes model.atsplan for "
        "this machine's CPU and 6 GiB of its GPU.",
        allow_abbrev=False,
    )
    whole = at_least(1)
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a GGUF or .onnx file, or the folder that holds ONNX",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PLAN", help="default: MODEL.atsplan beside the model"
    )
    parser.add_argument(
        "--ctx",
        type=whole,
        metavar="TOKENS",
        help="longest context (4096, or the model's if that is less)",
    )
    parser.add_argument(
        "--chunk", type=whole, metavar="TOKENS", help="most tokens that one round reads (512)"
    )
    parser.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="of the CPU (default: one a core)",
    )
    parser.add_argument(
        "--sessions", type=whole, metavar="N", help="conversations at once that memory is for (1)"
    )
    parser.add_argument(
        "--accuracy-level",
        type=int,
        choices=(1, 4),
        help="arithmetic of quantised weights: 1 with float activations, 4 with int8, which is "
        "faster (default: what the model says)",
    )
    parser.add_argument(
        "--target",
        default="auto",
        metavar="auto|NAME|FILE",
        help="machine to compile for: this one (auto), one that `atsc targets` lists, or a file of "
        "`atsc profile`",
    )
    parser.add_argument(
        "--policy",
        choices=("cpu", "tensor", "layer", "ffn", "expert", "gpu", "stream"),
        help="how units are placed (default: tensor with a GPU, else cpu)",
    )
    parser.add_argument(
        "--vram",
        type=parse_size,
        metavar="SIZE",
        help="all that the process may hold of the GPU's memory, as 6G or 800M (default: no GPU; "
        "with --policy or --target, what the target has)",
    )
    parser.add_argument(
        "--headroom", type=parse_size, metavar="SIZE", help="of it, what stays free (256M)"
    )
    parser.add_argument(
        "--prompt-share",
        type=float,
        metavar="SHARE",
        help="of all tokens, how many are prompt: what placement is best for (0.9)",
    )
    parser.add_argument(
        "--toolchain",
        choices=("system", "zig"),
        help="zig: the same library on any machine, for glibc 2.28 and later "
        "(default: the system's compiler, or zig where there is none)",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write what every stage makes, as text"
    )
    parser.add_argument(
        "--stop-after",
        metavar="STAGE",
        help="end after a stage, as import or optimise (-v lists them)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    for flag in ("--ram", "--disk"):
        parser.add_argument(flag, action=NotYet, instead=_NO_TIERS)
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    model = existing(args.model, "model", ModelError)
    refuse_other_formats(model)
    _check_target(args.target, args.vram, console)
    from atsc.compiler import plan
    from atsc.compiler.driver import CompileOptions, compile_model

    given = {
        "ctx": args.ctx,
        "chunk": args.chunk,
        "threads": args.threads,
        "sessions": args.sessions,
        "accuracy_level": args.accuracy_level,
        "policy": args.policy,
        "vram_bytes": args.vram,
        "headroom_bytes": args.headroom,
        "prompt_share": args.prompt_share,
        "toolchain": args.toolchain,
        "stop_after": args.stop_after,
        "output": args.output,
    }
    options = CompileOptions(
        model=model,
        target=args.target,
        **{key: value for key, value in given.items() if value is not None},
    )
    if args.toolchain is None:
        _say_toolchain(console)
    watcher = Watcher(console, args.dump)
    begin = time.monotonic()
    output = compile_model(options, watcher)
    seconds = time.monotonic() - begin
    manifest = plan.load(output) if output else None
    document = {
        "plan": str(output) if output else None,
        "plan_id": manifest.plan_id if manifest else None,
        "seconds": round(seconds, 3),
        "stages": [{"name": name, "seconds": round(took, 3)} for name, took in watcher.stages],
        "weights_bytes": manifest.memory.weights_bytes if manifest else None,
        "peak_bytes": manifest.memory.peak_bytes if manifest else None,
        "vram_bytes": _vram_bytes(manifest) if manifest else None,
    }
    console.result(document, _text(output, manifest, watcher, seconds))
    if manifest:
        _say_too_much(manifest, console)
        if not manifest.device:
            _say_unused_flags(args, console)
    return 0


def _vram_bytes(manifest: Manifest) -> int:
    """All that the process will hold of it."""
    from atsc.compiler.commands.memory_table import total, vram_regions

    return total(vram_regions(manifest)).predicted_bytes


def _say_too_much(manifest: Manifest, console: Console) -> None:
    """Of the target's memory; the plan may be meant for a larger machine, so it is made anyway."""
    needed, there = _host_bytes(manifest), manifest.target.get("ram_bytes")
    if isinstance(there, int) and 0 < there < needed:
        console.note(
            f"the plan takes {format_size(needed)} of host memory, and its target has "
            f"{format_size(there)}; choose a smaller --ctx, or fewer --sessions, where that helps"
        )


def _host_bytes(manifest: Manifest) -> int:
    from atsc.compiler.commands.memory_table import host_regions, total

    return total(host_regions(manifest)).predicted_bytes


def _say_unused_flags(args: argparse.Namespace, console: Console) -> None:
    """Of a plan without a GPU."""
    given = {"--vram": args.vram, "--headroom": args.headroom, "--prompt-share": args.prompt_share}
    unused = [flag for flag, value in given.items() if value is not None]
    if unused:
        console.note(f"without effect: {', '.join(unused)}; the plan is for the CPU alone")


class Watcher:
    """Observes a compilation: lines, progress bars and dumps."""

    def __init__(self, console: Console, dump_dir: Path | None) -> None:
        self.stages: list[tuple[str, float]] = []
        self._console = console
        self._dump_dir = dump_dir
        if dump_dir:
            try:
                dump_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--dump {dump_dir}: {error.strerror}; give a folder, or the name of a new one"
                ) from None

    def on_stage(self, index: int, name: str, artifact: object, seconds: float) -> None:
        """Say it with `-v`, write it with `--dump`."""
        self.stages.append((name, seconds))
        if self._console.verbose:
            self._console.note(f"{index + 1} {name:<12} {seconds:7.2f} s  {_summary(artifact)}")
        if self._dump_dir:
            text = _printed(artifact) + "\n"
            (self._dump_dir / f"{index + 1:02}-{name}.txt").write_text(text, "utf-8")

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Move the progress bar."""
        self._console.progress(what, done, total)


def _check_target(spec: str, vram_bytes: int | None, console: Console) -> None:
    """Kernels of every level are in every plan; a target must only have the lowest one."""
    from atsc.compiler.isa import ISA_FLAGS
    from atsc.targets.target import resolve

    levels = list(ISA_FLAGS)
    target = resolve(spec)
    if target.isa not in levels or levels.index(target.isa) < levels.index("x86-64-v3"):
        raise UsageError(
            f"--target {spec}: its CPU is {target.isa}, and kernels need x86-64-v3 (AVX2); "
            "choose another target"
        )
    if vram_bytes and 0 < target.vram_bytes < vram_bytes:
        console.note(
            f"--vram {format_size(vram_bytes)}: more than the {format_size(target.vram_bytes)} of "
            f"{target.gpu_model or target.name}; there a smaller placement will be used"
        )


def _say_toolchain(console: Console) -> None:
    """Zig takes the place of a compiler that is not there, but not silently."""
    from atsc.codegen.toolchain import find_compiler

    try:
        compiler = find_compiler()
    except CodegenError:
        return  # compile_model says what to do, if it comes to needing one
    if compiler.kind == "zig":
        console.note(
            f"no compiler on this system: building with {compiler.version} "
            "(its first build takes a minute longer)"
        )


def _summary(artifact: object) -> str:
    """What a stage made, in a few words: the sizes of whatever it holds."""
    if isinstance(artifact, Path):
        return str(artifact)
    fields = getattr(type(artifact), "__dataclass_fields__", {})
    parts = []
    for name in fields:
        value = getattr(artifact, name)
        if hasattr(value, "__len__") and not isinstance(value, str):
            parts.append(f"{len(value)} {name.replace('_', ' ')}")
    return ", ".join(parts)


def _printed(artifact: object) -> str:
    from atsc.compiler.ir import Graph
    from atsc.compiler.text import print_graph

    if isinstance(artifact, Graph):
        return print_graph(artifact)
    if isinstance(artifact, Path):
        return str(artifact)
    # Addresses differ from run to run, and dumps are there to be compared.
    return re.sub(r" at 0x[0-9a-f]+", "", pprint.pformat(artifact, width=100))


def _text(output: Path | None, manifest: Manifest | None, watcher: Watcher, seconds: float) -> str:
    if output is None or manifest is None:
        return f"stopped after {watcher.stages[-1][0]}, {seconds:.1f} s"
    if manifest.graph is not None:
        names = ", ".join(tensor.name for tensor in manifest.graph.inputs)
        return (
            f"{output}: {manifest.model.name}, no language model, {manifest.graph.num_kernels} "
            f"kernels, {format_size(manifest.memory.weights_bytes)} of constants, compiled in "
            f"{seconds:.1f} s\nrun it in Python: atsc.load({str(output)!r}).run(...), given "
            f"{names}"
        )
    lines = [
        f"{output}: {manifest.model.name}, {format_size(manifest.memory.weights_bytes)} of weights "
        f"in {counted(len(manifest.units), 'unit')}, context {manifest.options.ctx}, compiled in "
        f"{seconds:.1f} s",
        _takes(manifest),
    ]
    if manifest.device:
        lines.append(predicted_speed(manifest.device, manifest.options.chunk))
    if "tokenizer/tokenizer.json" in manifest.files:
        lines.append(f'run it with: atsc run {shlex.quote(str(output))} -p "Hello"')
    else:
        lines.append(
            "there was no tokenizer.json beside the model, and `atsc run` needs one: put it there "
            "and compile again, or work with token ids in Python"
        )
    return "\n".join(lines) + _unused_gpu(manifest)


def _takes(manifest: Manifest) -> str:
    """A line about memory, as `atsc inspect` tables it."""
    host = f"{format_size(_host_bytes(manifest))} of host memory"
    if not manifest.device:
        return f"takes {host}"
    placed = [unit for unit in manifest.units if unit.cost]
    num_there = sum(unit.residency == "vram" for unit in placed)
    return (
        f"takes {format_size(_vram_bytes(manifest))} of VRAM, where {num_there} of {len(placed)} "
        f"units live, and {host}"
    )


def _unused_gpu(manifest: Manifest) -> str:
    """A line about a GPU of the target that the plan leaves alone because nobody asked for it."""
    model, used = manifest.target.get("gpu_model"), manifest.target.get("gpu")
    if not model or used:
        return ""
    return f"\nthe plan is for the CPU alone; add --vram SIZE to use the {model} as well"
