"""Decoders that onnxruntime's own optimisers have written, and its converter to half floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT, logits_of
from decomposed_parts import LAYERS, Spelling
from exporter_operators import norms
from interpreter import replay
from mini_decoder import MICROSOFT, MiniDecoder
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.optimizer import optimize_model

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.passes.optimise import optimise

SPELLINGS = {
    "plain": Spelling(),
    "Gemma": Spelling(softcap=5.0, window=9, activation="gelu_tanh", norm="cast"),
    "Phi-2": Spelling(
        order="parallel", rope="partial", norm="layer", activation="gelu_tanh", mlp="plain",
        bias=True, head_bias=True,
    ),
    "learned positions": Spelling(rope="learned", norm="layer", activation="gelu_erf", bias=True),
    "boolean mask, guarded": Spelling(mask="boolean", guard=True),
    "cache of a fixed size": Spelling(cache="scatter_nd"),
}  # fmt: skip


Levels = onnxruntime.GraphOptimizationLevel
TOLERANCE = 2e-3


def optimised(path: Path, level: Levels = Levels.ORT_ENABLE_EXTENDED) -> set[str]:
    """Let onnxruntime rewrite a file as it would for itself; what operators there are now."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = level
    written = path.with_name("optimised.onnx")
    options.optimized_model_filepath = str(written)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    written.replace(path)
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("name", SPELLINGS)
def test_fused_operators(tmp_path: Path, name: str) -> None:
    path = Decoder(SPELLINGS[name]).save(tmp_path)
    expected = logits_of(path, SPELLINGS[name])
    assert "FusedMatMul" in optimised(path)
    assert_agrees(path, expected)


def assert_agrees(path: Path, expected: np.ndarray) -> None:
    graph = optimise(import_onnx(path))
    assert sum(node.op == "attention" for node in graph.nodes) == LAYERS
    actual = replay(graph, IDS, PROMPT)
    assert np.linalg.norm(actual - expected) <= TOLERANCE * np.linalg.norm(expected)


def convert(path: Path, keep_io_types: bool) -> None:
    """Make a model one of half floats, perhaps with casts behind its inputs and before outputs."""
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=keep_io_types), path)


HALF_SPELLINGS = SPELLINGS | {
    "layer norms, ReLU": Spelling(activation="relu2", norm="layer", rope="partial", mlp="plain"),
    "norms of heads": Spelling(qk_norm="before", norm="rms_div", packed=True, bias=True),
    "Attention with its caches": Spelling(fused="rows", mask="boolean"),
}


@pytest.mark.parametrize("keep_io_types", [False, True])
@pytest.mark.parametrize("name", HALF_SPELLINGS)
def test_converted_to_half_floats(tmp_path: Path, name: str, keep_io_types: bool) -> None:
    """As it is converted, and as onnxruntime's session writes it for CPUs then: with casts around
    what it has no half kernel for, and softmax as the body of its function.
    """
    spelling = HALF_SPELLINGS[name]
    path = Decoder(spelling).save(tmp_path)
    convert(path, keep_io_types)
    expected = logits_of(path, spelling)
    assert_agrees(path, expected)
    softmax = {"Softmax", "Attention"} & {node.op_type for node in onnx.load(path).graph.node}
    assert softmax - optimised(path, Levels.ORT_ENABLE_ALL) == {"Softmax"} & softmax
    assert_agrees(path, expected)


@pytest.mark.parametrize("level", [Levels.ORT_ENABLE_BASIC, Levels.ORT_ENABLE_ALL])
def test_half_floats_throughout(tmp_path: Path, level: Levels) -> None:
    spelling = Spelling(narrow="float16", mask="boolean", guard=True)
    path = Decoder(spelling).save(tmp_path)
    expected = logits_of(path, spelling)
    assert "Exp" in optimised(path, level)
    assert_agrees(path, expected)


def as_gpt2(path: Path) -> None:
    optimize_model(str(path), "gpt2", 4, 32, opt_level=0).save_model_to_file(str(path))


def then_half(path: Path) -> None:
    as_gpt2(path)
    convert(path, keep_io_types=True)


def after_session(path: Path) -> None:
    optimised(path)
    then_half(path)


@pytest.mark.parametrize("rewrite", [as_gpt2, then_half, after_session])
@pytest.mark.parametrize("name", ["plain", "Phi-2", "learned positions"])
def test_optimiser_of_transformers(
    tmp_path: Path, name: str, rewrite: Callable[[Path], None]
) -> None:
    """Among the rest the sum of embeddings and positions within the norm behind it."""
    spelling = SPELLINGS[name]
    path = Decoder(spelling).save(tmp_path)
    rewrite(path)
    if name == "learned positions" and rewrite is as_gpt2:
        ops = {node.op_type for node in onnx.load(path).graph.node}
        assert {"SkipLayerNormalization", "BiasGelu"} <= ops
    assert_agrees(path, logits_of(path, spelling))


MOVED: dict[str, tuple[type[Decoder], Spelling, list[Callable[[Path], object]]]] = {
    "a transpose within a norm of heads": (
        Decoder,
        Spelling(norm="rms_div", qk_norm="after", rope="learned", bias=True),
        [optimised, lambda path: convert(path, keep_io_types=False)],
    ),
    "transposes behind a cache merged": (
        Decoder,
        Spelling(repeat="grouped", cache="scatter_nd"),
        [then_half, lambda path: optimised(path, Levels.ORT_ENABLE_ALL)],
    ),
    "a root shared by norms": (
        norms("weight first"),
        Spelling(order="parallel_two"),
        [after_session],
    ),
    "weights of heads before a transpose": (
        norms("weight first"),
        Spelling(qk_norm="after", mask="boolean"),
        [optimised],
    ),
    "GELU as the body of its function": (
        Decoder,
        Spelling(activation="gelu_erf", fused="heads"),
        [optimised, lambda path: convert(path, keep_io_types=False), optimised],
    ),
    "GELUs without names": (
        Decoder,
        Spelling(activation="gelu_tanh"),
        [optimised, then_half, optimised],
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_optimisers_move(tmp_path: Path, name: str) -> None:
    """Found by random combinations of spellings and optimisers."""
    decoder, spelling, rewrites = MOVED[name]
    path = decoder(spelling).save(tmp_path)
    for rewrite in rewrites:
        rewrite(path)
    assert_agrees(path, logits_of(path, spelling))


@pytest.mark.parametrize("activation", ["Relu", "Tanh", "Sigmoid"])
def test_products_with_an_activation(activation: str) -> None:
    decoder = fused_gemm(activation)
    decoder.assert_agrees(tolerance=1e-5)


def test_other_activations_of_products_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the_FusedGemm: FusedGemm .* is not supported"):
        fused_gemm("LeakyRelu").imported()


def fused_gemm(activation: str) -> MiniDecoder:
    """FusedGemm, which takes matrices: rows without the batch."""
    rng = np.random.default_rng(0)
    decoder = MiniDecoder(rng.standard_normal((7, 16)).astype(np.float32))
    decoder.constant("w", rng.standard_normal((5, 16)).astype(np.float32))
    decoder.constant("b", rng.standard_normal(5).astype(np.float32))
    decoder.constant("flat", np.array([-1, 16], np.int64))
    decoder.constant("rows", np.array([1, -1, 5], np.int64))
    decoder.node("Reshape", ["x", "flat"], ["matrix"], name="flatten")
    decoder.node(
        "FusedGemm", ["matrix", "w", "b"], ["y"], MICROSOFT, transB=1, activation=activation
    )
    decoder.node("Reshape", ["y", "rows"], ["logits"])
    return decoder


@pytest.mark.parametrize("spelled", ["Max", "Clip"])
def test_relu_spelled_otherwise(spelled: str) -> None:
    decoder = MiniDecoder(np.random.default_rng(0).standard_normal((7, 16)).astype(np.float32))
    decoder.constant("zero", np.zeros((), np.float32))
    inputs = ["zero", "x"] if spelled == "Max" else ["x", "zero"]
    decoder.node(spelled, inputs, ["logits"])
    decoder.assert_agrees(tolerance=0)


@pytest.mark.parametrize(("spelled", "limit"), [("Max", 0.5), ("Clip", 0.5)])
def test_other_limits_are_refused(spelled: str, limit: float) -> None:
    decoder = MiniDecoder(np.zeros((7, 16), np.float32))
    decoder.constant("limit", np.array(limit, np.float32))
    decoder.node(spelled, ["x", "limit"], ["logits"])
    with pytest.raises(ModelError, match=f"the_{spelled}: {spelled} .* is not supported"):
        decoder.imported()


@pytest.mark.parametrize("name", ["plain", "learned positions"])
def test_dynamically_quantised_products(tmp_path: Path, name: str) -> None:
    """With a table that is dequantised anew for each reader, and biases within the products."""
    spelling = SPELLINGS[name]
    path = Decoder(spelling).save(tmp_path)
    floats = logits_of(path, spelling)
    written = tmp_path / "quantised.onnx"
    quantize_dynamic(path, written)
    theirs = logits_of(written, spelling)
    assert {"MatMulIntegerToFloat", "DynamicQuantizeMatMul"} <= optimised(written)
    ours = replay(optimise(import_onnx(written)), IDS, PROMPT)
    assert np.linalg.norm(ours - floats) <= 1.1 * np.linalg.norm(theirs - floats)
