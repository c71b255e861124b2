"""What commands do with plans of general graphs, which are no language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import Console, format_size, table
from atsc.compiler.errors import ModelError, PlanError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atsc.compiler.plan import GraphModel, GraphTensor, Manifest

ALLOWED_ERROR = 1e-3
"""Of `verify`: relative L2 error of each output, in float arithmetic on both sides."""
_SIZES = ((2, 16), (1, 9))
"""(of first dimensions, of all others) where a size is left open: two shapes."""


def refuse_general(directory: Path, command: str) -> None:
    """Say what a plan without a language model is for; all else is the command's.

    Raises:
        UsageError: the plan is of a general graph.
    """
    from atsc.compiler import plan

    try:
        manifest = plan.load(directory)
    except PlanError:
        return  # the command itself says what is wrong
    if manifest.graph is not None:
        inputs = ", ".join(f"{tensor.name!r}: ..." for tensor in manifest.graph.inputs)
        raise UsageError(
            f"{directory}: {manifest.model.name} is no language model, and `atsc {command}` runs "
            f"those alone; in Python: atsc.load({str(directory)!r}).run({{{inputs}}})"
        )


def describe(manifest: Manifest, graph: GraphModel, path: Path) -> str:
    """The text of `atsc inspect`."""
    rows = [["", "name", "type", "shape"]]
    for role, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        rows += [[role, t.name, t.dtype, f"[{', '.join(t.shape)}]"] for t in tensors]
    return (
        f"{path}: {manifest.model.name}, no language model\n"
        f"plan {manifest.plan_id}, atsc {manifest.atsc_version}, "
        f"{manifest.platform}, {manifest.isa} or higher\n"
        f"{graph.num_kernels} kernels in {graph.num_calls} calls, "
        f"{format_size(manifest.memory.weights_bytes)} of constants; what lies between calls is as "
        f"large as the inputs make it\n\n{table(rows)}"
    )


def verify(directory: Path, source: Path, threads: int | None, console: Console) -> int:
    """Compare a plan with onnxruntime on random inputs of two shapes.

    Raises:
        ModelError: onnxruntime cannot run the model.
        UsageError: the plan cannot run on such inputs.
    """
    import numpy as np

    from atsc.runtime import loader

    rows, worst = [["output", "shape", "relative L2 error", "largest difference"]], 0.0
    with loader.load(directory, threads=threads) as plan:
        graph = plan.manifest.graph
        assert graph is not None
        session = _session(source, threads)
        names = [tensor.name for tensor in graph.outputs]
        for number, sizes in enumerate(_SIZES):
            inputs = _random_inputs(graph, sizes, number)
            try:
                wanted = session.run(names, inputs)
            except Exception as error:
                reason = str(error).strip().splitlines()[0]
                raise ModelError(f"{source}: onnxruntime cannot run it ({reason})") from error
            found = plan.run(inputs)
            for name, theirs in zip(names, wanted, strict=True):
                ours, other = (np.asarray(x, np.float64) for x in (found[name], theirs))
                if ours.shape != other.shape:
                    raise PlanError(
                        f"{directory}: output {name} has shape {ours.shape}, and "
                        f"{source} makes {other.shape}; was the plan compiled from it?"
                    )
                difference = np.where(ours == other, 0, ours - other)
                error_here = float(np.linalg.norm(difference) / (np.linalg.norm(other) or 1))
                worst = max(worst, error_here if error_here == error_here else np.inf)
                most = float(np.abs(difference).max(initial=0))
                rows.append([name, str(list(ours.shape)), f"{error_here:.2e}", f"{most:.2e}"])
    is_fine = worst <= ALLOWED_ERROR
    document = {"ok": is_fine, "relative_l2": worst, "allowed": ALLOWED_ERROR}
    console.result(document, table(rows, right=(2, 3)))
    if not is_fine:
        console.note(f"atsc: {directory} is out of bounds: {ALLOWED_ERROR:g} is allowed")
    return 0 if is_fine else 1


def _session(source: Path, threads: int | None) -> Any:
    import onnxruntime

    from atsc.compiler.importers.onnx.model_file import open_model

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    path = open_model(source).path
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path}: onnxruntime cannot load it ({reason})") from error


def _random_inputs(graph: GraphModel, sizes: tuple[int, int], seed: int) -> dict[str, NDArray[Any]]:
    """Floats around 0; integers 0 and 1, which any table of indices has."""
    import numpy as np

    rng, symbols = np.random.default_rng(seed), dict[str, int]()

    def size_of(text: str, axis: int) -> int:
        return int(text) if text.isdigit() else symbols.setdefault(text, sizes[min(axis, 1)])

    def array(tensor: GraphTensor) -> NDArray[Any]:
        shape = tuple(size_of(text, axis) for axis, text in enumerate(tensor.shape))
        if tensor.dtype == "bfloat16":
            raise UsageError(
                f"input {tensor.name} is of bfloat16, which onnxruntime cannot be given"
            )
        if "float" in tensor.dtype:
            return rng.standard_normal(shape).astype(tensor.dtype)
        return rng.integers(0, 2, shape).astype(np.dtype(tensor.dtype))

    return {tensor.name: array(tensor) for tensor in graph.inputs}
