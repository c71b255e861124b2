"""compute-sanitizer over every CUDA kernel: a line a tool and family; exit code 1 on defects.

    python tests/gpu/sanitize.py [--tools memcheck,racecheck] [--families attention,hand-offs]
                                 [--samples 8] [--seconds 120] [--total 540] [--json FILE]

A family is an operator: its kernels run on a spread of its samples (small shapes; all dtypes and
variants are among them) in a Python child under the sanitizer, which also compares their results.
`hand-offs` are the kernels between CPU and GPU, as rounds of launches run them in a C++ program
that loads the driver by itself; as graphs they crash the sanitizer of CUDA 13.0, whatever is in
them. Kernels are compiled before, outside of it. Needs no pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
if importlib.util.find_spec("atsc") is None:  # a bare machine; a checkout would hide atsc.load
    sys.path.append(str(ROOT / ".links"))

from device_programs import build_modules, build_program  # noqa: E402

from atsc.codegen.cuda import has_cuda_template  # noqa: E402
from atsc.compiler.ops import all_ops  # noqa: E402

TOOLS = ("memcheck", "racecheck")
HAND_OFFS = "hand-offs"
HAND_OFF_TESTS = ("launches", "synchronous")
TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
FAILED, DEFECTS = 1, 77


@dataclass(frozen=True, slots=True)
class Finding:
    """What one tool says of one family."""

    tool: str
    family: str
    seconds: float
    defects: int | None
    """None: the sanitizer did not come to an end."""
    detail: str = ""

    @property
    def is_clean(self) -> bool:
        """Nothing found, and the program itself content with its results."""
        return self.defects == 0 and not self.detail

    def __str__(self) -> str:
        count = "not finished" if self.defects is None else f"{self.defects} defects"
        mark = "ok    " if self.is_clean else "FAILED"
        return f"{mark} {self.tool:9} {self.family:16} {count}, {self.seconds:.1f} s {self.detail}"


def families() -> dict[str, int]:
    """Families in the order in which they are checked, the open ones first; samples of each."""
    found = {
        op.name: sum(1 for _ in op.samples()) for op in all_ops().values() if has_cuda_template(op)
    }
    first = [name for name in ("attention", "rms_norm", "quantize") if name in found]
    rest = [name for name in found if name not in (*first, "linear")]
    order = [*first, *rest, *(["linear"] if "linear" in found else [])]
    return {first[0]: found[first[0]], HAND_OFFS: 0, **{name: found[name] for name in order[1:]}}


def find_sanitizer() -> Path | None:
    """The program, from PATH or the usual folder of the toolkit."""
    found = shutil.which("compute-sanitizer")
    return Path(found) if found else TOOLKIT if TOOLKIT.is_file() else None


def commands_of(
    family: str, num_samples: int, most: int, folder: Path, sm: int
) -> Iterator[list[object]]:
    """What runs a family's kernels, without the sanitizer."""
    if family == HAND_OFFS:
        modules = build_modules(folder / "modules", sm)
        program = build_program("device_test", folder / "device_test")
        for test in HAND_OFF_TESTS:
            yield [program, "cuda", test, 3, modules, sm]
        return
    every = max(1, num_samples // most)
    script = ROOT / "benchmarks" / "gpu_kernels.py"
    yield [sys.executable, script, "--only", "test", "--ops", family, "--every", every]


def check(
    sanitizer: Path, tool: str, family: str, command: Sequence[object], seconds: float
) -> Finding:
    """Run a program under a tool."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        options = ["--tool", tool, "--error-exitcode", DEFECTS, "--log-file", log]
        begin = time.monotonic()
        shown = run([sanitizer, *options, *command], seconds)
        took = time.monotonic() - begin
        text = log.read_text(errors="replace") if log.is_file() else ""
    return finding_of(tool, family, took, text, shown)


def finding_of(
    tool: str, family: str, took: float, log: str, shown: subprocess.CompletedProcess[str] | None
) -> Finding:
    """Read the sanitizer's log and the program's own words."""
    summary = SUMMARY.findall(log)
    defects = int(summary[-1]) if summary else None
    if shown is None:
        return Finding(tool, family, took, defects, "took too long; give --seconds or --samples")
    lines = [line.strip("= ") for line in log.splitlines() if line.strip("= ")]
    if defects:
        return Finding(tool, family, took, defects, "; ".join(lines[1:4]))
    if defects is None or shown.returncode not in (0, DEFECTS):
        words = (shown.stdout + shown.stderr).strip().splitlines() or lines or ["no message"]
        return Finding(tool, family, took, defects, f"exit code {shown.returncode}: {words[-1]}")
    return Finding(tool, family, took, defects)


def run(command: Sequence[object], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """A program's end and output; None if it was ended for taking too long."""
    words = [str(word) for word in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".links")}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def check_all(args: argparse.Namespace, sanitizer: Path, sm: int) -> Iterator[Finding]:
    """Every family under every tool, while there is time."""
    ends = time.monotonic() + args.total
    counts = families()
    wanted = args.families.split(",") if args.families else list(counts)
    with tempfile.TemporaryDirectory() as name:
        for family in wanted:
            for command in commands_of(family, counts[family], args.samples, Path(name), sm):
                begin = time.monotonic()
                plain = run(command, min(args.seconds, ends - begin))
                took = time.monotonic() - begin
                if plain is None or plain.returncode:
                    words = (plain.stdout + plain.stderr).splitlines() if plain else ["too slow"]
                    yield Finding("no tool", family, took, None, (words or [""])[-1])
                    continue
                for tool in args.tools.split(","):
                    left = min(args.seconds, ends - time.monotonic())
                    if left <= 0:
                        yield Finding(tool, family, 0, None, "no time left; give --total")
                    else:
                        yield check(sanitizer, tool, family, command, left)


def main() -> int:
    """Do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS), metavar="TOOL,...")
    parser.add_argument("--families", default="", metavar="NAME,...", help="which (all)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="of each, at most 2 N")
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="a run at most")
    parser.add_argument("--total", type=float, default=540, metavar="S", help="all at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")
    args = parser.parse_args()
    unknown = set(filter(None, args.families.split(","))) - set(families())
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(families())}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        parser.error("there is no compute-sanitizer; install the CUDA toolkit, or add it to PATH")
    from atsc.targets.target import resolve

    target = resolve("auto")
    if target.gpu != "cuda":
        parser.error("there is no NVIDIA GPU that can be used")
    found = []
    for finding in check_all(args, sanitizer, target.sm):
        print(finding, flush=True)
        found.append(finding)
    if args.json:
        args.json.write_text(json.dumps([asdict(finding) for finding in found], indent=1))
    return FAILED if any(not finding.is_clean for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())
