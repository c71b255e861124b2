"""Compares `plan.run` of graphs that are no decoders with onnxruntime: same file, same threads.

    general.py [--json] [--models minilm-16,resnet18] [--threads 1,2] [--seconds 4]

minilm-N is all-MiniLM-L6-v2 at batch 1 and N tokens (random weights of its shape where its package
is not installed), resnet18 and mobilenet have random weights and the layers of ResNet-18 and of
MobileNetV2, 224 x 224. A name that ends in -dynamic, -qdq or -qoperator is the model as
onnxruntime's quantize_dynamic or quantize_static writes it, calibrated with the very input. Both
engines take turns in one process, a few runs at a time; times are medians. onnxruntime optimises as
it does by default; its threads are told not to spin between its runs, since they would take the
cores from ours. The largest difference of any output, relative to its largest element, is printed
too; of quantised models it shows how far steps that fall the other way carry.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import atsc

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from bert import (
    BertShape,
    bert_model,
    minilm_folder,
    minilm_shape,
    random_weights,
    read_safetensors,
)

Arrays = Mapping[str, np.ndarray[Any, Any]]
MODELS = (
    *("minilm-16", "minilm-128", "resnet18", "mobilenet"),
    *("minilm-128-dynamic", "minilm-128-qdq", "resnet18-dynamic", "resnet18-qdq", "mobilenet-qdq"),
)
FORMATS = ("dynamic", "qdq", "qoperator")
MINILM = BertShape(vocab=30522, positions=512, width=384, heads=12, inner=1536, layers=6)
RUNS_OF_TURN = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one model on so many threads."""

    model: str
    threads: int
    onnxruntime_ms: float
    atsc_ms: float
    ratio: float
    """Our time by theirs."""
    difference: float
    turns: int


class Cnn:
    """Writes a network layer by layer; weights keep the scale of what flows through."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(5)

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """A node of one output."""
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], f"/{output}", **attrs))
        return output

    def weight(self, *shape: int) -> str:
        """A random tensor."""
        name = f"weight_{len(self.weights)}"
        taps = int(np.prod(shape[1:])) if len(shape) > 1 else 100
        content = self._rng.standard_normal(shape) * np.sqrt(1.6 / taps)
        self.weights.append(numpy_helper.from_array(content.astype(np.float32), name))
        return name

    def conv(
        self, x: str, channels: tuple[int, int], kernel: int, stride: int = 1, group: int = 1
    ) -> str:
        """A convolution that keeps the size but for its stride."""
        weight = self.weight(channels[1], channels[0] // group, kernel, kernel)
        attrs = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": group}
        return self.op("Conv", x, weight, self.weight(channels[1]), **attrs)

    def model(self, x: str, channels: int) -> onnx.ModelProto:
        """With the head: mean, one matrix, 1000 classes."""
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        made = self.op("Gemm", flat, self.weight(1000, channels), self.weight(1000), transB=1)
        self.nodes.append(helper.make_node("Identity", [made], ["classes"]))
        graph = helper.make_graph(
            self.nodes,
            "cnn",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 224, 224])],
            [helper.make_tensor_value_info("classes", TensorProto.FLOAT, [1, 1000])],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def resnet18() -> onnx.ModelProto:
    """The layers of ResNet-18, batch norms folded."""
    w = Cnn()
    x = w.op("Relu", w.conv("image", (3, 64), 7, 2))
    x = w.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 64
    for stage in range(4):
        for block in range(2):
            wider, stride = 64 << stage, 2 if stage and not block else 1
            y = w.op("Relu", w.conv(x, (width, wider), 3, stride))
            y = w.conv(y, (wider, wider), 3)
            x = x if stride == 1 else w.conv(x, (width, wider), 1, stride)
            x, width = w.op("Relu", w.op("Add", y, x)), wider
    return w.model(x, width)


def mobilenet() -> onnx.ModelProto:
    """The layers of MobileNetV2, batch norms folded."""
    w = Cnn()

    def relu6(x: str) -> str:
        return w.op("Clip", x, "zero", "six")

    w.weights += [
        numpy_helper.from_array(np.float32(value), name)
        for name, value in (("zero", 0), ("six", 6))
    ]
    x, width = relu6(w.conv("image", (3, 32), 3, 2)), 32
    for expand, wider, blocks, first_stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):  # fmt: skip
        for block in range(blocks):
            stride, inner = first_stride if block == 0 else 1, width * expand
            y = x if expand == 1 else relu6(w.conv(x, (width, inner), 1))
            y = relu6(w.conv(y, (inner, inner), 3, stride, group=inner))
            y = w.conv(y, (inner, wider), 1)
            x = w.op("Add", x, y) if stride == 1 and width == wider else y
            width = wider
    return w.model(relu6(w.conv(x, (width, 1280), 1)), 1280)


class OneInput(CalibrationDataReader):
    """The benchmark's input as calibration data."""

    def __init__(self, inputs: Arrays) -> None:
        self._left = [dict(inputs)]

    def get_next(self) -> dict[str, Any]:
        """It, once."""
        return self._left.pop() if self._left else {}


def quantised(model: onnx.ModelProto, form: str, inputs: Arrays) -> onnx.ModelProto:
    """What onnxruntime's quantisers write."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = (Path(folder) / name for name in ("floats.onnx", "integers.onnx"))
        onnx.save(model, source)
        if form == "dynamic":
            # onnxruntime's ConvInteger takes unsigned weights alone.
            has_images = any(node.op_type == "Conv" for node in model.graph.node)
            kind = QuantType.QUInt8 if has_images else QuantType.QInt8
            quantize_dynamic(source, target, weight_type=kind)
        else:
            written = QuantFormat.QDQ if form == "qdq" else QuantFormat.QOperator
            quantize_static(source, target, OneInput(inputs), quant_format=written)
        return onnx.load(target)


def make(name: str) -> tuple[onnx.ModelProto, Arrays]:
    """A model and its inputs."""
    base, _, form = name.rpartition("-")
    if form in FORMATS:
        model, inputs = make(base)
        return quantised(model, form, inputs), inputs
    rng = np.random.default_rng(3)
    if name.startswith("minilm-"):
        folder, length = minilm_folder(), int(name.removeprefix("minilm-"))
        shape = minilm_shape(folder) if folder else MINILM
        weights = read_safetensors(folder / "model.safetensors") if folder else None
        ids = rng.integers(0, shape.vocab, (1, length))
        inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        return bert_model(shape, weights or random_weights(shape)), inputs
    image = rng.standard_normal((1, 3, 224, 224)).astype(np.float32)
    return {"resnet18": resnet18, "mobilenet": mobilenet}[name](), {"image": image}


def alternate(
    engines: Sequence[Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> tuple[list[list[float]], int]:
    """Times in seconds of each engine, who take turns, and the number of turns."""
    times: list[list[float]] = [[] for _ in engines]
    end, turns = time.perf_counter() + seconds, 0
    while turns < 5 or time.perf_counter() < end:
        for own, run in zip(times, engines, strict=True):
            run()  # what the other one left in the caches is nobody's fault
            for _ in range(RUNS_OF_TURN):
                begin = clock()
                run()
                own.append(clock() - begin)
        turns += 1
    return times, turns


def session_of(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """onnxruntime on so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def compare(
    name: str, threads: Sequence[int], seconds: float, clock: Callable[[], float]
) -> list[Result]:
    """A model on each number of threads."""
    model, inputs = make(name)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        plan_path = atsc.compile(path, output=Path(folder) / "plan")
        assert plan_path is not None
        for count in threads:
            session = session_of(path, count)
            names = [output.name for output in session.get_outputs()]
            with atsc.load(plan_path, threads=count) as plan:
                found, wanted = plan.run(inputs), session.run(names, dict(inputs))
                difference = max(
                    float(np.abs(found[key] - array).max() / np.abs(array).max())
                    for key, array in zip(names, wanted, strict=True)
                )
                times, turns = alternate(
                    [
                        functools.partial(session.run, names, dict(inputs)),
                        functools.partial(plan.run, inputs),
                    ],
                    seconds,
                    clock,
                )
            theirs, ours = (statistics.median(own) * 1e3 for own in times)
            results.append(Result(name, count, theirs, ours, ours / theirs, difference, turns))
    return results


def main() -> int:
    """The table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each comparison")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the process, for a busy machine and one thread"
    )
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    threads = [int(count) for count in given.threads.split(",")]
    results = []
    if not given.json:
        print("| model | threads | onnxruntime ms | atsc ms | atsc by onnxruntime | difference |")
        print("|---|--:|--:|--:|--:|--:|")
    for name in given.models.split(","):
        for result in compare(name, threads, given.seconds, clock):
            results.append(result)
            if not given.json:
                print(
                    f"| {result.model} | {result.threads} | {result.onnxruntime_ms:.2f} "
                    f"| {result.atsc_ms:.2f} | {result.ratio:.2f} | {result.difference:.1e} |",
                    flush=True,
                )
    if given.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
