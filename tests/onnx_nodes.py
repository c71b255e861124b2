"""ONNX's own node tests through atsc (CPU) and onnxruntime; writes docs/onnx-coverage.md.

    .venv/bin/python tests/onnx_nodes.py [--only TEXT] [--backend kernels] [-o FILE]

A case is right (every output within the case's tolerance), refused (with its reason), or wrong:
a wrong value, a crash, an error that is not ours, or more than the time limit. Cases run in worker
processes, so that a crash costs one case.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

SECONDS_PER_CASE = 120.0
MOST_PARAMETER_ELEMENTS = 16
TOO_LATE = f"more than {SECONDS_PER_CASE:.0f} s"
HALF_RTOL = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
Verdict = Literal["right", "refused", "wrong"]
Runnable = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Backend = Callable[[onnx.ModelProto], Runnable]


@dataclass(frozen=True)
class Case:
    """A model with inputs and expected outputs."""

    name: str
    operator: str
    model: onnx.ModelProto
    data_sets: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    name: str
    operator: str
    verdict: Verdict
    reason: str
    in_onnxruntime: bool
    """Whether onnxruntime's CPU provider passes it."""
    frozen: bool = False
    """Whether its parameters (axes, shapes, counts) had to be constants of the model."""


def load_cases() -> list[Case]:
    """All node cases that the installed onnx has, in order of operator and name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        # Its generators draw random data at import: the same every time.
        np.random.seed(0)
        found = [case for case in load_model_tests(kind="node") if case.model is not None]
    single = {
        case.name: case.model.graph.node[0].op_type
        for case in found
        if len(case.model.graph.node) == 1
    }
    cases = [
        Case(
            case.name,
            _operator(case.name, case.model, single),
            case.model,
            case.data_sets,
            case.rtol,
            case.atol,
        )
        for case in found
    ]
    return sorted(cases, key=lambda case: (case.operator, case.name))


def sample(cases: Sequence[Case], count: int) -> list[Case]:
    """As many cases, spread evenly over all, which are in order of operator."""
    return [cases[index * len(cases) // count] for index in range(count)]


def _operator(name: str, model: onnx.ModelProto, single: Mapping[str, str]) -> str:
    """What a case tests: an expanded function's name is that of the case that it was made of."""
    base = re.sub(r"_expanded(_ver\d+)?$", "", name)
    return single.get(name) or single.get(base) or model.graph.node[-1].op_type


def kernel_backend() -> Backend:
    """Import, rules and kernels of a plan, called without its runtime: quick."""
    from graph_runner import compile_model

    return compile_model


def plan_backend() -> Backend:
    """Compile with atsc to a plan for the CPU, load it, run it."""
    import atsc
    from atsc.codegen.graph.build import generate_graph, has_rule
    from atsc.compiler.driver import CompileOptions
    from atsc.compiler.importers.onnx.general import general_of_proto
    from atsc.compiler.write_graph import write_graph
    from atsc.targets.target import resolve

    options = CompileOptions(model=Path("case.onnx"))
    target = dataclasses.replace(resolve("auto"), gpu="")

    def compile_model(model: onnx.ModelProto) -> Runnable:
        graph = general_of_proto(model, has_rule)
        code = generate_graph(graph)
        with tempfile.TemporaryDirectory() as folder:
            path = write_graph(graph, code, options, target, Path(folder) / "case.atsplan")
            plan = atsc.load(path, threads=2)
        return plan.run

    return compile_model


def onnxruntime_backend() -> Backend:
    """The reference that decides what a CPU can be expected to pass."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)

    def compile_model(model: onnx.ModelProto) -> Runnable:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        return lambda inputs: dict(zip(names, session.run(None, dict(inputs)), strict=True))

    return compile_model


def with_constant_parameters(case: Case) -> Case:
    """The case with small inputs but the first as constants, as exporters write parameters.

    ONNX's tests give axes, shapes and counts as inputs; shapes then depend on data, which a
    compiler refuses.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given, expected = case.data_sets[0]
    kept = []
    for place, (value, content) in enumerate(zip(case.model.graph.input, given, strict=False)):
        array = _array(content)
        small = isinstance(array, np.ndarray) and array.ndim <= 1
        if place and small and array.size <= MOST_PARAMETER_ELEMENTS:
            model.graph.initializer.append(
                content
                if isinstance(content, onnx.TensorProto)
                else numpy_helper.from_array(array, value.name)
            )
            model.graph.initializer[-1].name = value.name
            model.graph.input.remove(next(i for i in model.graph.input if i.name == value.name))
        else:
            kept.append(content)
    return dataclasses.replace(case, model=model, data_sets=[(kept, expected)])


def judge(backend: Backend, case: Case) -> tuple[Verdict, str]:
    """Run a case; errors of atsc are refusals if they come before the first result."""
    from atsc.compiler.errors import AtscError

    try:
        run = backend(case.model)
    except AtscError as error:
        return "refused", str(error)
    for given, expected in case.data_sets:
        names = [value.name for value in case.model.graph.input]
        try:
            results = run(dict(zip(names, map(_array, given), strict=False)))
        except AtscError as error:
            return "refused", str(error)
        for value, wanted in zip(case.model.graph.output, map(_array, expected), strict=False):
            problem = _difference(results[value.name], wanted, case)
            if problem:
                return "wrong", f"{value.name}: {problem}"
    return "right", ""


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _difference(found: Any, wanted: Any, case: Case) -> str:
    if isinstance(wanted, list) or wanted is None or isinstance(found, list):
        same = isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted)
        parts = zip(found, wanted, strict=True) if same else ()
        return "" if same and not any(_difference(a, b, case) for a, b in parts) else "not alike"
    found, wanted = np.asarray(found), np.asarray(wanted)
    if wanted.dtype == ml_dtypes.bfloat16 and found.dtype == np.uint16:
        found = found.view(ml_dtypes.bfloat16)  # numpy has no such type; a plan gives its bits
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)}, not {list(wanted.shape)}"
    if found.dtype != wanted.dtype and found.dtype.kind != "O":
        return f"{found.dtype}, not {wanted.dtype}"
    if found.dtype.kind in "OSU":
        return "" if (found == wanted).all() else "other text"
    # Nobody promises where halves are rounded inside of an operator: two units of the last place.
    rtol = max(case.rtol, HALF_RTOL.get(str(found.dtype), 0.0))
    if found.dtype.kind not in "bc":
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = np.isclose(found, wanted, rtol, case.atol, equal_nan=True)
    if close.all():
        return ""
    worst = np.argmin(close)
    return f"{(~close).sum()} of {close.size} differ: {found.flat[worst]}, not {wanted.flat[worst]}"


BACKENDS: dict[str, Callable[[], Backend]] = {"kernels": kernel_backend, "plan": plan_backend}


def run_cases(
    cases: Sequence[Case],
    jobs: int,
    on_outcome: Callable[[Outcome], None] | None = None,
    backend: str = "plan",
) -> list[Outcome]:
    """Run cases in worker processes; in the order of `cases`."""
    waiting = collections.deque(range(len(cases)))
    late: set[int] = set()
    outcomes: dict[int, Outcome] = {}
    workers = [_Worker(cases, backend) for _ in range(jobs)]
    try:
        while len(outcomes) < len(cases):
            # The first case alone: it compiles the runtime, which all others find in the cache.
            for worker in workers if outcomes else workers[:1]:
                if worker.current is None and waiting:
                    worker.start(waiting.popleft())
            busy = [worker for worker in workers if worker.current is not None]
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                outcome = worker.poll()
                if outcome is None or worker.current is None:
                    continue
                index, worker.current = worker.current, None
                if outcome.reason == TOO_LATE and index not in late:
                    # A busy machine is no fault of the case: it gets one more chance.
                    late.add(index)
                    waiting.append(index)
                    continue
                outcomes[index] = outcome
                if on_outcome:
                    on_outcome(outcome)
    finally:
        for worker in workers:
            worker.stop()
    return [outcomes[index] for index in range(len(cases))]


class _Worker:
    """A process that judges one case at a time, and is replaced when it dies."""

    def __init__(self, cases: Sequence[Case], backend: str) -> None:
        self._cases, self._backend = cases, backend
        self.current: int | None = None
        self._since = 0.0
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._backend))
        self._process.start()
        theirs.close()

    def start(self, index: int) -> None:
        self.current, self._since = index, time.monotonic()
        self.pipe.send(self._cases[index])

    def poll(self) -> Outcome | None:
        """The outcome, if there is one by now; a dead or late process is a wrong case."""
        assert self.current is not None
        case = self._cases[self.current]
        late = time.monotonic() - self._since > SECONDS_PER_CASE
        try:
            if self.pipe.poll():
                outcome: Outcome = self.pipe.recv()
                return outcome
        except (EOFError, ConnectionResetError):
            late = True
        if not late and self._process.is_alive():
            return None
        took_long = self._process.is_alive()
        self.stop()
        reason = TOO_LATE if took_long else "crash"
        self._spawn()
        return Outcome(case.name, case.operator, "wrong", reason, True)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(pipe: Connection, backend: str) -> None:
    """Judge what comes, until the pipe ends."""
    warnings.simplefilter("ignore")
    # What libraries print about models that they refuse belongs to no report.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    ours, other = BACKENDS[backend](), onnxruntime_backend()
    while True:
        try:
            case: Case = pipe.recv()
        except EOFError:
            return
        verdict, reason = _judge_safely(ours, case)
        frozen = False
        if verdict == "refused" and len(case.data_sets) == 1 and len(case.data_sets[0][0]) > 1:
            second = _judge_safely(ours, with_constant_parameters(case))
            if second[0] != "refused":
                (verdict, reason), frozen = second, True
        try:
            passes = judge(other, case)[0] == "right"
        except Exception:
            passes = False  # onnxruntime refuses by many classes of errors
        pipe.send(Outcome(case.name, case.operator, verdict, reason, passes, frozen))


def _judge_safely(backend: Backend, case: Case) -> tuple[Verdict, str]:
    try:
        return judge(backend, case)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"


def report(outcomes: Sequence[Outcome]) -> str:
    """The page: totals, operators, reasons."""
    expected = [outcome for outcome in outcomes if outcome.in_onnxruntime]
    lines = [
        "# ONNX's node tests",
        "",
        f"All {len(outcomes)} node cases of onnx {onnx.__version__}, compiled to plans and run on",
        "the CPU.",
        "Refused means that the compiler says which node it cannot take; wrong means a wrong",
        "value, a crash, or no answer in time. Values may differ by the tolerances of the cases,",
        "those of fp16 and bf16 by two units of the last place. Written by",
        "`.venv/bin/python tests/onnx_nodes.py`.",
        f"Of the right ones {sum(o.frozen and o.verdict == 'right' for o in outcomes)} have their "
        "parameters (axes, shapes, counts) as constants of the model,",
        "as exporters write them, where the test gives them as inputs.",
        "",
        "| cases | all | right | refused | wrong | right of all |",
        "|---|---|---|---|---|---|",
        _total("all", outcomes),
        _total("that onnxruntime's CPU provider passes", expected),
        "",
        "## By operator",
        "",
        "Functions count with the cases of their expanded bodies.",
        "",
        "| operator | cases | onnxruntime | right | refused | wrong |",
        "|---|---|---|---|---|---|",
    ]
    groups = collections.defaultdict(list)
    for outcome in outcomes:
        groups[outcome.operator].append(outcome)
    for operator, group in sorted(groups.items()):
        passed = sum(outcome.in_onnxruntime for outcome in group)
        counts = " | ".join(str(_count(group, verdict)) for verdict in VERDICTS)
        lines.append(f"| {operator} | {len(group)} | {passed} | {counts} |")
    lines += ["", "## Why cases are refused", "", "| cases | reason |", "|---|---|"]
    reasons = collections.Counter(
        _summary(outcome.reason) for outcome in outcomes if outcome.verdict == "refused"
    )
    lines += [f"| {count} | {reason} |" for reason, count in _by_count(reasons)]
    wrong = [outcome for outcome in outcomes if outcome.verdict == "wrong"]
    if wrong:
        lines += ["", "## Wrong cases", "", "| case | what |", "|---|---|"]
        lines += [f"| {outcome.name} | {_cell(outcome.reason)} |" for outcome in wrong]
    return "\n".join(lines) + "\n"


VERDICTS: tuple[Verdict, ...] = ("right", "refused", "wrong")


def _total(name: str, outcomes: Sequence[Outcome]) -> str:
    counts = [_count(outcomes, verdict) for verdict in VERDICTS]
    share = 100 * counts[0] / max(1, len(outcomes))
    return f"| {name} | {len(outcomes)} | {' | '.join(map(str, counts))} | {share:.1f} % |"


def _count(outcomes: Iterable[Outcome], verdict: Verdict) -> int:
    return sum(outcome.verdict == verdict for outcome in outcomes)


def _by_count(counter: collections.Counter[str]) -> list[tuple[str, int]]:
    return sorted(counter.items(), key=lambda item: (-item[1], item[0]))


def _summary(reason: str) -> str:
    """A reason without the names of one case."""
    first = reason.split("\n")[0]
    first = re.sub(r"^\S*: \d+ nodes? (is|are) not supported: ", "", first)
    first = re.sub(r"^\S+: (\w+) \((\S+), opset \d+\)", r"\1 of \2", first)
    first = re.sub(r"node \S+ \((\w+), opset \d+\)", r"\1", first)
    return _cell(first)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name or operator has this")
    parser.add_argument("--backend", choices=BACKENDS, default="plan")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="default: docs/onnx-coverage.md")
    arguments = parser.parse_args()
    cases = [
        case
        for case in load_cases()
        if arguments.only in case.name or arguments.only == case.operator
    ]
    done = collections.Counter[str]()

    def show(outcome: Outcome) -> None:
        done[outcome.verdict] += 1
        if outcome.verdict == "wrong" or arguments.only:
            print(f"{outcome.verdict:8} {outcome.name}: {_cell(outcome.reason)}", flush=True)
        elif sum(done.values()) % 100 == 0:
            print(dict(done), "of", len(cases), file=sys.stderr, flush=True)

    outcomes = run_cases(cases, arguments.jobs, show, arguments.backend)
    default = Path(__file__).parent.parent / "docs" / "onnx-coverage.md"
    if not arguments.only or arguments.output:
        (arguments.output or default).write_text(report(outcomes), "utf-8")
    print(dict(done))


if __name__ == "__main__":
    main()
