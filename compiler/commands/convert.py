"""`atsc convert`: a GGUF file as ONNX, without loss, with its tokenizer beside it."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

from atsc.compiler.commands.console import Console, existing, format_size
from atsc.compiler.commands.other_formats import refuse_other_than_gguf
from atsc.compiler.errors import ModelError, UsageError


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "convert", help="convert GGUF to ONNX", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="MODEL.onnx")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    source = existing(args.model, "GGUF file", ModelError)
    if args.output.suffix != ".onnx":
        raise UsageError(f"-o {args.output}: give the name of an .onnx file")
    if args.output.exists() and args.output.samefile(source):
        raise UsageError(f"-o {args.output}: the GGUF file itself; give another name")
    refuse_other_than_gguf(source)
    from atsc.compiler.importers.gguf import convert_gguf

    begin = time.monotonic()
    sizes = convert_gguf(source, args.output, progress=console.progress)
    seconds = time.monotonic() - begin
    console.result(
        {
            "source": str(source),
            "model": str(args.output),
            "seconds": round(seconds, 3),
            "source_bytes": sizes.source_bytes,
            "weight_bytes": sizes.weight_bytes,
            "rotary_bytes": sizes.rotary_bytes,
        },
        f"{args.output} written in {seconds:.1f} s; compile it with: atsc compile "
        f"{shlex.quote(str(args.output))}\n"
        f"weights: {format_size(sizes.source_bytes)} in the GGUF file,"
        f" {format_size(sizes.weight_bytes)} in ONNX"
        f" ({sizes.weight_bytes / sizes.source_bytes:.2f} times as much),"
        f" and {format_size(sizes.rotary_bytes)} of RoPE tables",
    )
    return 0
