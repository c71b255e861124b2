"""Decoders as other exporters may write them: right against onnxruntime, or refused with advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import exporter_operators as operators
import exporter_spellings as spellings
import numpy as np
import onnx
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT
from decomposed_parts import LAYERS, SIZE, Spelling
from exporter_operators import norms, repeats
from exporter_spellings import moved_axes, renamed, retyped, run, with_input
from interpreter import replay
from onnx import TensorProto
from plan_logits import plan_logits

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.passes.optimise import optimise

KINDS = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions"}
INT64 = TensorProto.INT64


@dataclass(frozen=True)
class Case:
    """A decoder, what is changed of its file, and kinds of inputs that are named otherwise."""

    decoder: type[Decoder]
    changes: Sequence[spellings.Change] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    spelling: Spelling = field(default_factory=Spelling)

    def save(self, folder: Path) -> Path:
        path = self.decoder(self.spelling).save(folder)
        model = onnx.load(path)
        for change in self.changes:
            change(model)
        onnx.save(model, path)
        return path


NAMES = {
    "input_ids": "tokens",
    "attention_mask": "mask",
    "position_ids": "pos",
    "past_key_values": "cache_in",
    "present": "cache_out",
    "logits": "scores",
}
RIGHT = {
    "float positions": Case(
        spellings.FloatPositions, [retyped("position_ids", TensorProto.FLOAT, ["B", "M"])]
    ),
    "positions of one axis": Case(
        spellings.Places,
        [retyped("position_ids", INT64, ["M"], "cache_position")],
        {"cache_position": "places"},
    ),
    "a number of past tokens": Case(
        spellings.CountedFromPast,
        [retyped("position_ids", INT64, [], "start_pos")],
        {"start_pos": "past"},
    ),
    "one in a vector": Case(
        spellings.CountedFromPast,
        [retyped("position_ids", INT64, [1], "start_pos")],
        {"start_pos": "past"},
    ),
    "other names": Case(
        Decoder, [renamed(NAMES)], {"tokens": "ids", "mask": "mask", "pos": "positions"}
    ),
    "ids of 32 bits": Case(Decoder, [retyped("input_ids", TensorProto.INT32, ["B", "M"])]),
    "a boolean mask": Case(Decoder, [retyped("attention_mask", TensorProto.BOOL, ["B", "T"])]),
    "a mask of floats": Case(Decoder, [retyped("attention_mask", TensorProto.FLOAT, ["B", "T"])]),
    "an input that nobody reads": Case(
        Decoder, [with_input("token_type_ids", ["B", "M"])], {"token_type_ids": "zeros"}
    ),
    "tokens outside of heads": Case(spellings.TokensOutside, [moved_axes([0, 2, 1, 3])]),
    "tokens outside, grouped": Case(
        spellings.TokensOutside,
        [moved_axes([0, 2, 1, 3])],
        spelling=Spelling(repeat="grouped", qk_norm="before", window=5),
    ),
    "turned keys": Case(spellings.TurnedKeys, [moved_axes([0, 1, 3, 2], "key")]),
    **{
        f"norms: {kind}": Case(norms(kind))
        for kind in ("sum", "sum of squares", "length", "unit", "weight first")
    },
    **{
        f"heads repeated {kind}": Case(repeats(kind))
        for kind in ("by index", "one by one", "inside")
    },
    "Einsum": Case(operators.Einsums),
    "matrices with a batch": Case(operators.BatchedMatrices),
    "SiLU spelled out": Case(operators.SpelledSilu),
    "functions of the model": Case(operators.Functions, [operators.with_function]),
    "opset 12": Case(operators.OldOpset, [operators.with_opset_12]),
    "opset 12, packed": Case(
        operators.OldOpset,
        [operators.with_opset_12],
        spelling=Spelling(packed=True, mlp="packed", norm="layer", bias=True, qk_norm="before"),
    ),
    "a table of masks": Case(spellings.MaskTable),
    "tables of angles": Case(spellings.AngleTables),
    "a turned table": Case(spellings.TurnedTable),
    "columns of codes": Case(spellings.ColumnsOfCodes, [spellings.with_opsets]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(tmp_path: Path, name: str) -> None:
    case = RIGHT[name]
    path = case.save(tmp_path)
    expected = run(path, KINDS | case.kinds)
    graph = optimise(import_onnx(path))
    actual = replay(graph, IDS, PROMPT)
    assert np.linalg.norm(actual - expected) <= 2e-3 * np.linalg.norm(expected)
    assert sum(node.op == "attention" for node in graph.nodes) == LAYERS


FLOAT = TensorProto.FLOAT
REFUSED = {
    "a mask of the caller": (
        Case(spellings.CallersMask, [retyped("attention_mask", FLOAT, ["B", 1, "M", "T"])]),
        "attention_mask: input of the model: a mask with shape [?, 1, ?, ?] is computed by the",
        1,
    ),
    "angles of the caller": (
        Case(
            spellings.CallersAngles,
            [with_input(f"rope_{part}", ["B", 1, "M", SIZE]) for part in ("cos", "sin")],
        ),
        "rope_cos: input of the model: angles with shape [?, 1, ?, 16] are computed by the caller",
        2,
    ),
    "types of tokens": (
        Case(spellings.TypedTokens, [with_input("token_type_ids", ["B", "M"])]),
        "token_type_ids: input of the model: a plan reads token ids alone",
        1,
    ),
    "eps outside": (Case(norms("eps outside")), "eps belongs inside of the root", 5),
    "least eps": (Case(norms("least eps")), "a norm that is none of x / sqrt(mean(x^2) + eps)", 5),
    "sinks": (Case(operators.Sinks), "attention sinks: these are taken of GroupQueryAttention", 2),
    "heads in turn": (Case(repeats("in turn")), "is not causal attention of 4 heads of 16", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_advice(tmp_path: Path, name: str) -> None:
    """One line for each thing that is wrong, and none for what hangs on it."""
    case, reason, count = REFUSED[name]
    with pytest.raises(ModelError) as error:
        import_onnx(case.save(tmp_path))
    lines = str(error.value).splitlines()
    assert reason in lines[0]
    assert len(lines) == count


@pytest.mark.toolchain
@pytest.mark.parametrize("name", ["tokens outside of heads", "columns of codes"])
def test_plans(tmp_path: Path, name: str) -> None:
    """On the CPU, and on the virtual device."""
    case = RIGHT[name]
    path = case.save(tmp_path)
    expected = run(path, KINDS | case.kinds)
    for logits in plan_logits(path, tmp_path, [int(token) for token in IDS], PROMPT):
        assert np.linalg.norm(logits - expected) <= 2e-3 * np.linalg.norm(expected)
