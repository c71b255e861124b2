"""Files as onnxruntime's quantizers write them, and DequantizeLinear in its other forms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter, replay
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer, QuantFormat

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import BlockFormat
from atsc.compiler.weights import dequantize
from atsc.passes.optimise import optimise

FEW = settings(max_examples=60, deadline=None, derandomize=True)
SIGNED = {TensorProto.INT4: (-8, 8), TensorProto.INT8: (-128, 128)}
UNSIGNED = {TensorProto.UINT4: (0, 16), TensorProto.UINT8: (0, 256)}
RANGES = SIGNED | UNSIGNED


def integers(
    decoder: MiniDecoder, rng: np.random.Generator, name: str, element: int, shape: tuple[int, ...]
) -> str:
    """An initializer of random 4- or 8-bit integers."""
    values = rng.integers(*RANGES[element], shape)
    decoder.initializers.append(helper.make_tensor(name, element, shape, values.reshape(-1)))
    return name


@FEW
@given(
    element=st.sampled_from(list(RANGES)),
    form=st.sampled_from(["tensor", "outputs", "inputs", "blocks", "blocks of outputs"]),
    block_size=st.sampled_from([8, 16, 32, 48, 64, 512]),
    shape=st.tuples(st.integers(2, 150), st.integers(2, 40)),
    turned=st.booleans(),
    turned_codes=st.booleans(),
    zero_points=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dequantize_linear(
    element: int,
    form: str,
    block_size: int,
    shape: tuple[int, int],
    turned: bool,
    turned_codes: bool,
    zero_points: bool,
    seed: int,
) -> None:
    """Every axis, block and type, with the matrix stored either way round, and turned or not."""
    rng = np.random.default_rng(seed)
    width, outputs = shape
    stored = (outputs, width) if turned else (width, outputs)
    width_axis = 1 if turned else 0
    axis = width_axis if form in ("inputs", "blocks") else 1 - width_axis
    blocked = form.startswith("blocks")
    parts = list(stored) if blocked else [] if form == "tensor" else [stored[axis]]
    if blocked:
        parts[axis] = -(-stored[axis] // block_size)
    decoder = MiniDecoder(rng.standard_normal((3, width), np.float32), opset=21)
    if turned_codes and element in (TensorProto.INT8, TensorProto.UINT8):
        integers(decoder, rng, "stored", element, stored[::-1])
        decoder.node("Transpose", ["stored"], ["codes"], name="turn_codes", perm=[1, 0])
    else:
        integers(decoder, rng, "codes", element, stored)
    scales = rng.uniform(-0.1, 0.1, tuple(parts)).astype(np.float32)
    names = ["codes", decoder.constant("scales", scales)]
    if zero_points:
        names.append(integers(decoder, rng, "points", element, tuple(parts)))
    decoder.node(
        "DequantizeLinear", names, ["w"], axis=axis, block_size=block_size if blocked else None
    )
    read = "w"
    if turned:
        read = decoder.node("Transpose", ["w"], ["turned"], perm=[1, 0])
    decoder.node("MatMul", ["x", read], ["logits"])
    decoder.assert_agrees(tolerance=2e-5)


@pytest.mark.parametrize("element", [TensorProto.INT4, TensorProto.UINT8])
def test_blocks_stay_blocks(element: int) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((3, 96), np.float32), opset=21)
    integers(decoder, rng, "codes", element, (96, 7))
    decoder.constant("scales", rng.uniform(0.1, 0.2, (3, 7)).astype(np.float32))
    decoder.node("DequantizeLinear", ["codes", "scales"], ["w"], axis=0, block_size=32)
    decoder.node("MatMul", ["x", "w"], ["logits"])
    (weight,) = (w for n, w in decoder.imported().weights.items() if n != "table")
    four = element == TensorProto.INT4
    assert weight.format == BlockFormat(4 if four else 8, 32, has_zero_points=not four)
    (linear,) = (n for n in decoder.imported(accuracy_level=4).nodes if n.op == "linear")
    assert linear.attrs["accuracy_level"] == 4


def test_a_quantised_table_tied_to_the_head_is_one_weight() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(np.zeros((7, 1), np.float32), opset=21)
    decoder.nodes.clear()
    integers(decoder, rng, "codes", TensorProto.INT4, (7, 64))
    decoder.constant("scales", rng.uniform(0.1, 0.2, (7, 2)).astype(np.float32))
    decoder.node("DequantizeLinear", ["codes", "scales"], ["floats"], axis=1, block_size=32)
    decoder.node("Gather", ["floats", "input_ids"], ["rows"])
    decoder.node("Transpose", ["floats"], ["turned"], perm=[1, 0])
    decoder.node("MatMul", ["rows", "turned"], ["logits"])
    decoder.assert_agrees(tolerance=1e-5)
    assert list(decoder.imported().weights) == ["codes"]


def test_the_same_codes_with_other_scales_are_another_weight() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((3, 16), np.float32), opset=21)
    integers(decoder, rng, "codes", TensorProto.INT8, (16, 16))
    for name, value in (("a", 0.01), ("b", 0.03)):
        decoder.constant(f"scale_{name}", np.array(value, np.float32))
        decoder.node("DequantizeLinear", ["codes", f"scale_{name}"], [name], name=f"dq_{name}")
    decoder.node("MatMul", ["x", "a"], ["y"], name="first")
    decoder.node("MatMul", ["y", "b"], ["logits"], name="second")
    decoder.assert_agrees(tolerance=1e-5)
    assert len(decoder.imported().weights) == 3


@pytest.mark.parametrize("size", [9, 200])
def test_a_quantised_bias(size: int) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((3, size), np.float32), opset=21)
    decoder.constant("bias", rng.integers(-999, 999, size).astype(np.int32))
    decoder.constant("scale", np.array(0.01, np.float32))
    decoder.node("DequantizeLinear", ["bias", "scale"], ["floats"])
    decoder.node("Add", ["x", "floats"], ["logits"])
    decoder.assert_agrees(tolerance=1e-6)


@pytest.mark.parametrize(
    ("scales", "attrs", "reason"),
    [
        ((3, 7), {"axis": 0, "block_size": 64}, r"scales have shape \[3, 7\], expected \[2, 7\]"),
        ((7,), {"axis": 0}, r"scales have shape \[7\], expected \[96\]"),
        ((3, 7), {"axis": 5, "block_size": 32}, "attributes axis 5 and block_size 32 do not fit"),
    ],
)
def test_scales_that_do_not_fit(
    scales: tuple[int, ...], attrs: dict[str, int], reason: str
) -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((3, 96), np.float32), opset=21)
    integers(decoder, rng, "codes", TensorProto.INT8, (96, 7))
    decoder.constant("scales", np.ones(scales, np.float32))
    decoder.node("DequantizeLinear", ["codes", "scales"], ["w"], **attrs)
    decoder.node("MatMul", ["x", "w"], ["logits"])
    with pytest.raises(ModelError, match=reason):
        decoder.imported()


def float_decoder(width: int = 96, outputs: int = 45) -> MiniDecoder:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((6, width), np.float32), opset=21)
    decoder.constant("w1", rng.standard_normal((width, outputs), np.float32))
    decoder.constant("bias", rng.standard_normal(outputs, np.float32))
    decoder.constant("w2", rng.standard_normal((outputs, 7), np.float32))
    decoder.node("Relu", ["x"], ["positive"])
    decoder.node("MatMul", ["positive", "w1"], ["y"], name="first")
    decoder.node("Add", ["y", "bias"], ["z"])
    decoder.node("MatMul", ["z", "w2"], ["logits"], name="second")
    return decoder


class Rewritten(MiniDecoder):
    """A decoder whose file somebody else has written."""

    def __init__(self, decoder: MiniDecoder, model: onnx.ModelProto) -> None:
        self.__dict__.update(decoder.__dict__)
        self.written = model

    def model(self) -> onnx.ModelProto:
        return self.written


@pytest.mark.parametrize("quant_format", list(QuantFormat))
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits_quantizer(bits: int, symmetric: bool, quant_format: QuantFormat) -> None:
    if quant_format is QuantFormat.QDQ and bits != 4:
        pytest.skip("the quantizer writes QDQ for 4 bits alone")
    decoder = float_decoder()
    quantizer = MatMulNBitsQuantizer(
        decoder.model(), bits=bits, block_size=32, is_symmetric=symmetric, accuracy_level=1,
        quant_format=quant_format,
    )  # fmt: skip
    quantizer.process()
    made = Rewritten(decoder, quantizer.model.model)
    made.assert_agrees(tolerance=2e-5)
    formats = {str(w.format) for w in made.imported().weights.values()}
    zero_points = "z" if not symmetric else ""
    assert f"int{max(bits, 4)}b32{zero_points}" in formats


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_table_of_the_quantizer(symmetric: bool) -> None:
    """The embedding becomes a GatherBlockQuantized of int4 or uint4 elements."""
    decoder = float_decoder()
    quantizer = MatMulNBitsQuantizer(
        decoder.model(), block_size=32, is_symmetric=symmetric, accuracy_level=1,
        op_types_to_quantize=("MatMul", "Gather"), quant_axes=(("MatMul", 0), ("Gather", 1)),
    )  # fmt: skip
    quantizer.process()
    made = Rewritten(decoder, quantizer.model.model)
    made.assert_agrees(tolerance=2e-5)
    table = made.imported().weights["table_Q4"]
    assert table.format == BlockFormat(4, 32, has_zero_points=not symmetric)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
def test_quantize_dynamic(tmp_path: Path, kind: QuantType, per_channel: bool) -> None:
    """Weights are the file's to the bit; only the rounding of activations is another one."""
    decoder = float_decoder()
    written = tmp_path / "written.onnx"
    quantize_dynamic(decoder.save(tmp_path), written, weight_type=kind, per_channel=per_channel)
    made = Rewritten(decoder, onnx.load(written))
    ops = {node.op_type for node in made.model().graph.node}
    assert {"DynamicQuantizeLinear", "MatMulInteger"} <= ops
    ids = np.arange(6)
    floats = decoder.onnxruntime([ids])
    theirs = made.onnxruntime([ids])
    graph = made.imported()
    linears = [node for node in graph.nodes if node.op == "linear"]
    assert [node.attrs["accuracy_level"] for node in linears] == [4, 4]

    def error(logits: np.ndarray, reference: np.ndarray) -> float:
        return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))

    ours = Interpreter(optimise(graph)).round(ids)
    assert error(ours, theirs) < 2e-2
    assert error(ours, floats) < 1.5 * error(theirs, floats)
    weights = {name.removesuffix("_quantized"): w for name, w in graph.weights.items()}
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in made.model().graph.initializer}
    for name in ("w1", "w2"):
        codes = arrays[f"{name}_quantized"].astype(np.float32)
        points = arrays[f"{name}_zero_point"].astype(np.float32)
        wanted = (codes - points) * arrays[f"{name}_scale"]
        np.testing.assert_allclose(dequantize(weights[name]), wanted.T, rtol=1e-6)


def test_a_dynamically_quantised_table(tmp_path: Path) -> None:
    decoder = float_decoder()
    written = tmp_path / "written.onnx"
    quantize_dynamic(
        decoder.save(tmp_path), written, op_types_to_quantize=["Gather"], per_channel=False
    )
    made = Rewritten(decoder, onnx.load(written))
    assert "DequantizeLinear" in {node.op_type for node in made.model().graph.node}
    made.assert_agrees(tolerance=1e-5)
    table = made.imported().weights["table_quantized"]
    assert isinstance(table.format, BlockFormat) and table.format.bits == 8


def test_dynamic_quantize_matmul() -> None:
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((6, 96), np.float32))
    integers(decoder, rng, "codes", TensorProto.INT8, (96, 7))
    decoder.constant("scales", rng.uniform(0.01, 0.02, 7).astype(np.float32))
    integers(decoder, rng, "points", TensorProto.INT8, (7,))
    decoder.constant("bias", rng.standard_normal(7, np.float32))
    decoder.node(
        "DynamicQuantizeMatMul", ["x", "codes", "scales", "points", "bias"], ["logits"], MICROSOFT
    )
    decoder.assert_agrees(tolerance=2e-2)


def test_what_is_no_dynamic_quantisation_is_refused() -> None:
    """The zero point of the product is not the one that the activations were rounded with."""
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((6, 96), np.float32))
    integers(decoder, rng, "codes", TensorProto.INT8, (96, 7))
    decoder.constant("scale", np.array(0.01, np.float32))
    decoder.node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    decoder.node("MatMulInteger", ["q", "codes"], ["i"])
    decoder.node("Cast", ["i"], ["f"], to=TensorProto.FLOAT)
    decoder.node("Mul", ["s", "scale"], ["both"], name="scales")
    decoder.node("Mul", ["f", "both"], ["logits"])
    with pytest.raises(ModelError, match=r"the_MatMulInteger: .* MatMulInteger is not supported"):
        decoder.imported()


@pytest.mark.parametrize("level", [1, 4])
def test_an_export_of_the_builder(export: Callable[[str], Path], level: int) -> None:
    """Its twin with MatMulNBits has the same weights, and logits with float activations; its own
    are of onnxruntime's level 4, which rounds what reads a DequantizeLinear.
    """
    expected = np.load(export("qwen3-int4-cpu") / "expected.npz")
    graph = optimise(import_onnx(export("qwen3-int4qdq-cpu"), accuracy_level=level))
    logits = replay(graph, expected["ids"], int(expected["prompt_len"]))
    error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
    assert error <= (2e-3 if level == 1 else 4e-2)
    assert np.mean(logits.argmax(1) == expected["logits"].argmax(1)) >= 0.9


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows_first", "per_row"), [(False, False), (False, True), (True, False)]
)  # gathered rows do not tell which scale is theirs
def test_a_dynamic_head_tied_to_the_table(rows_first: bool, turned: bool, per_row: bool) -> None:
    """MatMulInteger of the codes that the table is gathered from, stored either way round."""
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(np.zeros((7, 1), np.float32), opset=21)
    decoder.nodes.clear()
    integers(decoder, rng, "stored", TensorProto.UINT8, (32, 7) if turned else (7, 32))
    decoder.node("Identity", ["stored"], ["same"])
    decoder.node("Transpose", ["same"], ["flipped"], perm=[1, 0])
    codes, head = ("flipped", "stored") if turned else ("stored", "flipped")
    sizes = (7,) if per_row else ()
    scales = decoder.constant("scales", rng.uniform(0.01, 0.02, sizes).astype(np.float32))
    integers(decoder, rng, "points", TensorProto.UINT8, sizes)
    if rows_first:
        decoder.node("Gather", [codes, "input_ids"], ["taken"])
        decoder.node("DequantizeLinear", ["taken", scales, "points"], ["x"])
    else:
        decoder.node("DequantizeLinear", [codes, scales, "points"], ["floats"], axis=0)
        decoder.node("Gather", ["floats", "input_ids"], ["x"])
    decoder.node("DynamicQuantizeLinear", ["x"], ["q", "q_scale", "q_point"])
    decoder.node("MatMulInteger", ["q", head, "q_point", "points"], ["sum"])
    decoder.node("Cast", ["sum"], ["wide"], to=TensorProto.FLOAT)
    decoder.node("Mul", ["q_scale", scales], ["both"], name="both_scales")
    decoder.node("Mul", ["wide", "both"], ["logits"])
    graph = decoder.imported()
    assert [weight.format for weight in graph.weights.values()] == [BlockFormat(8, 256, True)]
    theirs = decoder.onnxruntime([np.arange(7)])
    ours = Interpreter(optimise(graph)).round(np.arange(7))
    assert np.linalg.norm(ours - theirs) <= 2e-2 * np.linalg.norm(theirs)
