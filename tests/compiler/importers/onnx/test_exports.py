"""Whole models by public exporters, against their expected logits."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from interpreter import Interpreter, replay
from onnx import TensorProto
from onnxruntime.transformers.optimizer import optimize_model

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.text import print_graph
from atsc.passes.optimise import optimise

Export = Callable[[str], Path]
INT4 = ("llama3-int4-cpu", "qwen3-int4gather-cpu", "qwen3-int4-cpu", "phi3long-int4-cpu")
DECOMPOSED = (
    "optimum-tiny-qwen2",
    "optimum-tiny-opt",
    "torch-tiny-llama3-op18",
    "torch-tiny-qwen3-op23",
)
FLOAT = ("qwen3-fp32-cpu", "gemma2-nowin-fp32-cpu", *DECOMPOSED)


@functools.cache
def logits(folder: Path, accuracy_level: int, optimised: bool) -> np.ndarray:
    graph = import_onnx(folder, accuracy_level=accuracy_level, context=4096)
    expected = np.load(folder / "expected.npz")
    graph = optimise(graph) if optimised else graph
    return replay(graph, expected["ids"], int(expected["prompt_len"]))


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("name", INT4 + FLOAT)
def test_logits_with_float_inputs(export: Export, name: str, optimised: bool) -> None:
    folder = export(name)
    expected = np.load(folder / "expected.npz")["logits"]
    assert relative_l2(logits(folder, 1, optimised), expected) <= 2e-3


@pytest.mark.parametrize("name", INT4 + FLOAT)
def test_passes_do_not_change_float_results(export: Export, name: str) -> None:
    folder = export(name)
    assert relative_l2(logits(folder, 1, True), logits(folder, 1, False)) <= 1e-5


@pytest.mark.parametrize("name", INT4)
def test_logits_with_int8_activations(export: Export, name: str) -> None:
    folder = export(name)
    expected = np.load(folder / "expected.npz")["logits"]
    actual = logits(folder, 4, True)
    assert 1e-3 < relative_l2(actual, expected) <= 4e-2
    assert np.mean(actual.argmax(1) == expected.argmax(1)) >= 0.9


def test_only_wanted_rows_go_through_the_head(export: Export) -> None:
    folder = export("llama3-int4-cpu")
    ids = np.load(folder / "expected.npz")["ids"][:12]
    graph = optimise(import_onnx(folder, accuracy_level=1))
    every = Interpreter(graph).round(ids)
    wanted = Interpreter(graph).round(ids, np.array([11, 3]))
    np.testing.assert_allclose(wanted, every[[11, 3]], rtol=1e-5, atol=1e-6)


def test_units_keep_their_weights_apart(export: Export) -> None:
    graph = optimise(import_onnx(export("qwen3-int4gather-cpu")))
    linears = [node.inputs[1] for node in graph.nodes if node.op == "linear"]
    assert len(linears) == len(set(linears)) == 11
    assert [n.op for n in graph.nodes if n.op not in ("linear", "rms_norm", "quantize")] == [
        "embed",
        "attention",
        "attention",
        "select_rows",
    ]


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_graphs_become_canonical(export: Export, name: str) -> None:
    """Nothing of masks, angles and norms is left beside the operators that replace them."""
    graph = optimise(import_onnx(export(name)))
    ops = {node.op for node in graph.nodes}
    norm, extra = (
        ("layer_norm", {"add_positions", "mul"}) if "opt" in name[8:] else ("rms_norm", ())
    )
    assert ops == {"embed", "attention", "linear", "select_rows", norm, *extra}


def test_model_info_of_a_folder(export: Export) -> None:
    info = import_onnx(export("llama3-int4-cpu")).info
    assert info.name == "llama3-int4-cpu"
    assert (info.vocab_size, info.context_length) == (1056, 4096)
    assert (info.bos_token_id, info.eos_token_ids) == (1, (2,))
    assert [Path(file).name for file in info.source_files] == ["model.onnx", "model.onnx.data"]
    assert [Path(file).name for file in info.companion_files] == ["genai_config.json"]


REFUSED = {
    "gptoss-nowin-int4-cpu": [
        f"/model/layers.{layer}/moe/QMoE: QMoE (com.microsoft, opset 1): operator QMoE is not"
        for layer in range(2)
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(export: Export, name: str) -> None:
    folder = export(name)
    with pytest.raises(ModelError) as error:
        import_onnx(folder)
    for part in REFUSED[name]:
        assert part in str(error.value)
    assert str(error.value).startswith(f"{folder / 'model.onnx'}: 2 nodes are not")


def narrowed(source: Path, target: Path, element: int) -> None:
    """The model as the builder writes it for GPUs: all floats narrow, logits cast back."""
    model = onnx.load(source / "model.onnx")
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor)
            narrow = values.astype(onnx.helper.tensor_dtype_to_np_dtype(element))
            tensor.CopyFrom(
                onnx.helper.make_tensor(tensor.name, element, values.shape, narrow.tobytes(), True)
            )
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name != "logits":
            value.type.tensor_type.elem_type = element
    graph.node[-1].output[0] = "narrow_logits"
    cast = onnx.helper.make_node(
        "Cast", ["narrow_logits"], ["logits"], name="widen", to=TensorProto.FLOAT
    )
    graph.node.append(cast)
    onnx.save(model, target / "model.onnx")
    for name in ("genai_config.json", "expected.npz"):
        shutil.copy(source / name, target)


@pytest.mark.parametrize(
    ("element", "tolerance"), [(TensorProto.FLOAT16, 2e-3), (TensorProto.BFLOAT16, 2e-2)]
)
@pytest.mark.parametrize("name", ["llama3-int4-cpu", "qwen3-fp32-cpu"])
def test_half_precision_files(
    export: Export, tmp_path: Path, name: str, element: int, tolerance: float
) -> None:
    """Activations stay fp32: only the rounding of the weights is left."""
    folder = export(name)
    narrowed(folder, tmp_path, element)
    expected = np.load(folder / "expected.npz")["logits"]
    assert relative_l2(logits(tmp_path, 1, True), expected) <= tolerance


@pytest.mark.parametrize("name", ["optimum-tiny-qwen2", "optimum-tiny-opt"])
def test_files_of_the_optimiser_of_transformers(export: Export, tmp_path: Path, name: str) -> None:
    """Rope as RotaryEmbedding of heads in the midst of plain attention."""
    folder = export(name)
    model = optimize_model(str(folder / "model.onnx"), "bert", opt_level=0)
    assert ("RotaryEmbedding" in model.get_operator_statistics()) == ("qwen2" in name)
    model.save_model_to_file(str(tmp_path / "model.onnx"))
    shutil.copy(folder / "expected.npz", tmp_path)
    expected = np.load(folder / "expected.npz")["logits"]
    assert relative_l2(logits(tmp_path, 1, True), expected) <= 2e-3


def test_a_folder_and_its_file_are_the_same_model(export: Export) -> None:
    folder = export("qwen3-int4gather-cpu")
    assert print_graph(import_onnx(folder)) == print_graph(import_onnx(folder / "model.onnx"))
