"""`atsc targets`: this machine, and the target files that come with atsc."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from atsc.compiler.commands.console import Console, format_size, table


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "targets", help="list targets", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.targets.target import builtin_names, resolve

    found = {name: resolve(name) for name in ["auto", *builtin_names()]}
    rows = [["target", "isa", "cores", "threads", "memory", "VRAM", "GPU", "CPU"]]
    for name, target in found.items():
        cores, threads = str(target.num_cores or "-"), str(target.default_threads)
        sizes = [format_size(n) if n else "-" for n in (target.ram_bytes, target.vram_bytes)]
        gpu = target.gpu_model or target.gpu or "-"
        rows.append([name, target.isa, cores, threads, *sizes, gpu, target.cpu_model])
    documents = [
        {"target": name, **dataclasses.asdict(target), "default_threads": target.default_threads}
        for name, target in found.items()
    ]
    console.result({"targets": documents}, table(rows, right=(2, 3, 4, 5)))
    return 0
