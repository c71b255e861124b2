"""If on the length of the sequence: the branch is chosen for the context of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from interpreter import replay
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto, helper

from atsc.compiler.cli import main
from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.weights import dequantize

LIMIT = 5


def longrope(op: str, swapped: bool, otherwise: bool) -> MiniDecoder:
    """x times 2 while there are at most LIMIT tokens, times 3 beyond."""
    decoder = MiniDecoder(np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32))
    _, _ = decoder.lengths()
    limit = LIMIT + (op in ("Less", "GreaterOrEqual"))
    if swapped:
        limit = LIMIT + (op in ("Greater", "LessOrEqual"))
    decoder.constant("limit", np.array(limit, np.int64))
    sides = ["limit", "width"] if swapped else ["width", "limit"]
    decoder.node(op, sides, ["is_long"])
    branches = {}
    for branch, factor in (
        ("then_branch", 2 if otherwise else 3),
        ("else_branch", 3 if otherwise else 2),
    ):
        tensor = helper.make_tensor("v", TensorProto.FLOAT, [8], [factor] * 8)
        node = helper.make_node("Constant", [], [f"{branch}_out"], value=tensor)
        info = helper.make_tensor_value_info(f"{branch}_out", TensorProto.FLOAT, [8])
        branches[branch] = helper.make_graph([node], branch, [], [info])
    decoder.node("If", ["is_long"], ["factor"], **branches)
    decoder.node("Mul", ["x", "factor"], ["logits"])
    return decoder


def imported(decoder: MiniDecoder, folder: Path, context: int | None) -> tuple[float, int]:
    graph = import_onnx(decoder.save(folder), context=context)
    factor = next(w for name, w in graph.weights.items() if name != "table")
    return float(dequantize(factor)[0]), graph.info.context_length


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", ["Greater", "GreaterOrEqual", "Less", "LessOrEqual"])
def test_every_spelling_of_the_limit(tmp_path: Path, op: str, swapped: bool) -> None:
    """Up to the limit it is what onnxruntime computes; so is a sequence that is longer at once."""
    decoder = longrope(op, swapped, otherwise=op.startswith("Less") != swapped)
    short, long = np.arange(LIMIT), np.arange(LIMIT + 1)
    table = np.frombuffer(decoder.initializers[0].raw_data, np.float32).reshape(12, 8)
    np.testing.assert_allclose(decoder.onnxruntime([short]), 2 * table[short])
    np.testing.assert_allclose(decoder.onnxruntime([long]), 3 * table[long])
    with pytest.warns(UserWarning, match=f"limited to {LIMIT} tokens, .* reaches 128 with others"):
        assert imported(decoder, tmp_path, None) == (2, LIMIT)
    assert imported(decoder, tmp_path, LIMIT) == (2, LIMIT)
    assert imported(decoder, tmp_path, LIMIT + 1) == (3, 128)


def test_no_word_of_a_limit_that_is_the_model_s_own(tmp_path: Path) -> None:
    """Warnings are errors in tests."""
    path = longrope("Greater", False, False).save(tmp_path)
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"context_length": LIMIT}}))
    assert import_onnx(path).info.context_length == LIMIT


@pytest.mark.filterwarnings("default")
def test_the_command_says_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = longrope("Greater", False, False)
    decoder.nodes[-1].output[0] = "product"
    past, present = decoder.cache(0, 1, 8)
    decoder.constant("w", np.ones((8, 24), np.float32))
    decoder.node("MatMul", ["product", "w"], ["qkv"])
    decoder.node(
        "GroupQueryAttention", ["qkv", "", "", *past, "seqlens", "total"], ["logits", *present],
        MICROSOFT, num_heads=1, kv_num_heads=1,
    )  # fmt: skip
    path = decoder.save(tmp_path)
    command = ["compile", str(path), "-o", str(tmp_path / "p.atsplan"), "--stop-after", "import"]
    assert main(command) == 0
    note = f"atsc: {path}: limited to {LIMIT} tokens, "
    assert capsys.readouterr().err.count(note) == 1
    assert main([*command, "--ctx", "9"]) == 0
    assert "limited" not in capsys.readouterr().err


def test_a_condition_on_something_else_is_refused() -> None:
    decoder = longrope("Greater", False, False)
    decoder.nodes[-3].input[1] = "width"
    with pytest.raises(ModelError, match="a comparison other than the length of the sequence"):
        decoder.imported()


def test_longrope(export: Callable[[str], Path]) -> None:
    """The long tables are another model beyond 4096 tokens, and reach as far as the model does."""
    folder = export("phi3long-int4-cpu")
    expected = np.load(folder / "expected.npz")
    short = import_onnx(folder, accuracy_level=1, context=4096)
    long = import_onnx(folder, accuracy_level=1, context=4097)
    assert (short.info.context_length, long.info.context_length) == (4096, 8192)
    ids = expected["ids"][:30]
    logits = [replay(graph, ids, 30) for graph in (short, long)]
    assert np.linalg.norm(logits[0] - expected["logits"][:30]) <= 2e-3 * np.linalg.norm(logits[0])
    assert np.linalg.norm(logits[1] - logits[0]) > 1e-2 * np.linalg.norm(logits[0])
