"""Commands on a plan that is no language model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from atsc.compiler.cli import main

pytestmark = pytest.mark.toolchain


def _classifier() -> onnx.ModelProto:
    weight = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Softmax", ["y"], ["shares"], axis=-1),
        ],
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("shares", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("general")
    onnx.save(_classifier(), path / "model.onnx")
    assert main(["compile", str(path / "model.onnx"), "-o", str(path / "plan")]) == 0
    return path


@pytest.mark.parametrize("command", [["run", "-p", "hi"], ["bench"], ["simulate"]])
def test_language_commands_refuse_it(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], str(folder / "plan"), *command[1:]]) != 0
    error = capsys.readouterr().err
    assert f"model is no language model, and `atsc {command[0]}` runs those alone" in error
    assert ".run({'x': ...})" in error
    assert error.count("\n") == 1


def test_inspect_lists_inputs_and_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "plan")]) == 0
    text = capsys.readouterr().out
    assert "input   x       float32  [n, 6]" in text
    assert "output  shares  float32  [n, 3]" in text
    assert main(["inspect", str(folder / "plan"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["graph"]["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["n", "6"]}]


def test_check_reads_all_of_it(folder: Path) -> None:
    assert main(["check", str(folder / "plan"), "--full"]) == 0


def test_verify_compares_with_onnxruntime(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(folder / "plan")
    assert main(["verify", plan, str(folder / "model.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relative_l2"] < 1e-5
    other = _classifier()
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((6, 3), np.float32), "w"))
    onnx.save(other, tmp_path / "other.onnx")
    assert main(["verify", plan, str(tmp_path / "other.onnx")]) == 1
    assert "out of bounds" in capsys.readouterr().err


def test_a_gpu_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder / "model.onnx")
    assert main(["compile", model, "--target", "virtual", "--vram", "1G"]) != 0
    assert "no language model" in capsys.readouterr().err
