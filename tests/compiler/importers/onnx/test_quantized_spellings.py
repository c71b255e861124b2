"""Decoders of plain operators, quantised by onnxruntime's tools in every way that they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT, logits_of
from decomposed_parts import LAYERS, Spelling
from interpreter import replay
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer, QuantFormat

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import Graph
from atsc.passes.optimise import optimise

SPELLINGS = {
    "rope": Spelling(),
    "learned positions": Spelling(rope="learned", norm="layer", activation="gelu_tanh", bias=True),
    "opset 23": Spelling(fused="rows", mask="boolean"),
}
TABLES: dict[str, Any] = {"op_types_to_quantize": ("MatMul", "Gather")}
Quantise = Callable[[Path], None]


def by_blocks(*, hqq: bool = False, **options: Any) -> Quantise:
    """MatMulNBitsQuantizer; with `hqq`, zero points become what HQQ writes (it needs torch)."""

    def quantise(path: Path) -> None:
        given = {"block_size": 16, "is_symmetric": False, "accuracy_level": 1} | options
        quantizer = MatMulNBitsQuantizer(onnx.load(path), **given)
        quantizer.process()
        model = quantizer.model.model
        if hqq:
            make_zero_points_float(model.graph)
        onnx.save(model, path)

    return quantise


def make_zero_points_float(graph: onnx.GraphProto) -> None:
    """Flat scales, and flat zero points of the scales' type that are no integers."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    rng = np.random.default_rng(0)
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            scales, packed = (numpy_helper.to_array(tensors[name]) for name in node.input[2:4])
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
            points = codes[:, : scales.shape[1]] + rng.uniform(-0.5, 0.5, scales.shape)
            for name, array in zip(node.input[2:4], (scales, points), strict=True):
                flat = array.astype(np.float32).reshape(-1)
                tensors[name].CopyFrom(numpy_helper.from_array(flat, name))


def dynamic(**options: Any) -> Quantise:
    """quantize_dynamic."""

    def quantise(path: Path) -> None:
        written = path.with_name("quantised.onnx")
        quantize_dynamic(path, written, **options)
        written.replace(path)

    return quantise


BLOCKS = {
    "signed": by_blocks(is_symmetric=True),
    "zero points": by_blocks(),
    "HQQ": by_blocks(hqq=True),
    "8 bits": by_blocks(bits=8),
    "2 bits": by_blocks(bits=2),
    "QDQ": by_blocks(quant_format=QuantFormat.QDQ),
    "QDQ, signed": by_blocks(quant_format=QuantFormat.QDQ, is_symmetric=True),
    "QDQ by output": by_blocks(quant_format=QuantFormat.QDQ, channel_wised_quantize=True),
    "tables": by_blocks(**TABLES, quant_axes=(("MatMul", 0), ("Gather", 1))),
    "signed tables": by_blocks(**TABLES, quant_axes=(("MatMul", 0), ("Gather", 1)), bits=8),
    "tables across rows": by_blocks(**TABLES, quant_axes=(("MatMul", 0), ("Gather", 0))),
    "tables, dynamically": dynamic(op_types_to_quantize=["Gather"]),
}
DYNAMIC = {
    "signed": dynamic(),
    "unsigned": dynamic(weight_type=QuantType.QUInt8),
    "by output": dynamic(per_channel=True),
    "products alone": dynamic(op_types_to_quantize=["MatMul"]),
}


def quantised(folder: Path, spelling: Spelling, how: Quantise) -> tuple[Graph, np.ndarray]:
    """The graph of a quantised model, and onnxruntime's logits of it."""
    path = Decoder(spelling).save(folder)
    how(path)
    return optimise(import_onnx(path)), logits_of(path, spelling)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in SPELLINGS
        for how in BLOCKS
        if SPELLINGS[name].fused == "no" or how in ("HQQ", "QDQ", "tables across rows")
    ],
)
def test_quantised_weights(tmp_path: Path, name: str, how: str) -> None:
    graph, expected = quantised(tmp_path, SPELLINGS[name], BLOCKS[how])
    assert error(replay(graph, IDS, PROMPT), expected) < 2e-3


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in SPELLINGS
        for how in DYNAMIC
        if SPELLINGS[name].fused == "no" or how == "products alone"
    ],
)  # quantize_dynamic makes an invalid file of Attention
def test_quantised_activations(tmp_path: Path, name: str, how: str) -> None:
    """Both round activations, each in its way: as far from the floats as the file is, at most."""
    spelling = SPELLINGS[name]
    floats = logits_of(Decoder(spelling).save(tmp_path), spelling)
    (tmp_path / "quantised").mkdir()
    graph, theirs = quantised(tmp_path / "quantised", spelling, DYNAMIC[how])
    ours = replay(graph, IDS, PROMPT)
    assert error(ours, theirs) < 0.1
    assert error(ours, floats) < 1.1 * error(theirs, floats)


def test_a_head_tied_to_dynamically_quantised_codes_is_one_weight(tmp_path: Path) -> None:
    graph, _ = quantised(tmp_path, Spelling(), dynamic())
    (embed,) = (node for node in graph.nodes if node.op == "embed")
    assert embed.inputs[1] == [node for node in graph.nodes if node.op == "linear"][-1].inputs[1]
    assert str(graph.weights[embed.inputs[1]].format) == "int8b256z"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("opset 23", {}, "QAttention (com.microsoft, opset 1): quantize_dynamic makes it of"),
        (
            "rope",
            {"extra_options": {"MatMulConstBOnly": False}},
            "MatMulInteger (ai.onnx, opset 18): a product of activations that are both",
        ),
    ],
)
def test_an_attention_that_quantize_dynamic_spoils_is_named_alone(
    tmp_path: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    path = Decoder(SPELLINGS[name]).save(tmp_path)
    dynamic(**options)(path)
    with pytest.raises(ModelError) as error:
        import_onnx(path)
    lines = str(error.value).splitlines()
    assert len(lines) <= 2 * LAYERS and all(reason in line for line in lines)
