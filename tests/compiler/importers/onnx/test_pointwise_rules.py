"""Activations and arithmetic in onnxruntime and here, and what the passes make of them."""

from __future__ import annotations

import numpy as np
import pytest
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto

from atsc.compiler.errors import ModelError
from atsc.passes.canonicalize import Canonicalize


def decoder(width: int = 12) -> MiniDecoder:
    return MiniDecoder(4 * np.random.default_rng(0).standard_normal((7, width), np.float32))


@pytest.mark.parametrize(
    ("op", "domain", "attrs", "kind"),
    [
        ("Sigmoid", "", {}, "sigmoid"),
        ("Tanh", "", {}, "tanh"),
        ("Relu", "", {}, "relu"),
        ("Gelu", "", {}, "gelu"),
        ("Gelu", "", {"approximate": "none"}, "gelu"),
        ("Gelu", "", {"approximate": "tanh"}, "gelu_tanh"),
        ("Gelu", MICROSOFT, {}, "gelu"),
        ("FastGelu", MICROSOFT, {}, "gelu_tanh"),
        ("QuickGelu", MICROSOFT, {}, "quick_gelu"),
        ("QuickGelu", MICROSOFT, {"alpha": 1.702}, "quick_gelu"),
        ("QuickGelu", MICROSOFT, {"alpha": 1.0}, "silu"),
    ],
)
def test_activations(op: str, domain: str, attrs: dict[str, float], kind: str) -> None:
    mini = decoder()
    mini.node(op, ["x"], ["logits"], domain, **attrs)
    assert mini.imported().nodes[-1].attrs == {"kind": kind}
    mini.assert_agrees(tolerance=2e-5)


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu"])
def test_biased_gelu(op: str) -> None:
    mini = decoder()
    mini.constant("bias", np.linspace(-1, 1, 12, dtype=np.float32))
    mini.node(op, ["x", "bias"], ["logits"], MICROSOFT)
    mini.assert_agrees(tolerance=2e-5)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(), (1,), (12,), (1, 1, 12)])
def test_arithmetic_with_constants(op: str, shape: tuple[int, ...]) -> None:
    mini = decoder()
    mini.constant("c", np.random.default_rng(1).uniform(1, 2, shape).astype(np.float32))
    mini.node(op, ["x", "c"], ["y"])
    if op in ("Add", "Mul"):
        mini.node(op, ["c", "y"], ["z"], name="reversed")
    else:
        mini.node(op, ["y", "x"], ["z"], name="of_values")
    mini.node("Cast", ["z"], ["logits"], to=TensorProto.FLOAT)
    mini.assert_agrees()


def test_a_constant_minus_a_value_is_refused() -> None:
    mini = decoder()
    mini.constant("c", np.ones(12, np.float32))
    mini.node("Sub", ["c", "x"], ["logits"])
    with pytest.raises(ModelError, match=r"the_Sub: Sub \(.*: input 0 is the constant c"):
        mini.imported()


@pytest.mark.parametrize("swapped", [False, True])
def test_silu_in_either_order(swapped: bool) -> None:
    mini = decoder()
    mini.node("Sigmoid", ["x"], ["s"])
    mini.node("Mul", ["s", "x"] if swapped else ["x", "s"], ["logits"])
    mini.assert_agrees()
    (_, node) = Canonicalize().run(mini.imported()).nodes
    assert (node.op, node.inputs, node.attrs) == ("activation", ("x",), {"kind": "silu"})


@pytest.mark.parametrize("exponent", [np.float32(2), np.int64(2)])
def test_squared_relu(exponent: np.generic) -> None:
    mini = decoder()
    mini.constant("two", np.asarray(exponent))
    mini.node("Relu", ["x"], ["r"])
    mini.node("Pow", ["r", "two"], ["logits"])
    mini.assert_agrees()
    (_, node) = Canonicalize().run(mini.imported()).nodes
    assert (node.op, node.inputs, node.attrs) == ("activation", ("x",), {"kind": "relu2"})


def test_another_power_is_refused() -> None:
    mini = decoder()
    mini.constant("three", np.float32(3))
    mini.node("Pow", ["x", "three"], ["logits"])
    with pytest.raises(ModelError, match=r"the_Pow: Pow \(.*: the exponent is not .* 2$"):
        mini.imported()


def test_quick_gelu_of_another_slope_is_refused() -> None:
    mini = decoder()
    mini.node("QuickGelu", ["x"], ["logits"], MICROSOFT, alpha=1.5)
    with pytest.raises(ModelError, match=r"attribute alpha is 1\.5, supported: 1\.702 or 1"):
        mini.imported()


def test_a_split_comes_apart_and_is_whole_again() -> None:
    mini = decoder()
    mini.node("Split", ["x"], ["a", "b", "c"], axis=-1, num_outputs=3)
    mini.node("Add", ["a", "b"], ["ab"])
    mini.node("Mul", ["ab", "c"], ["logits"])
    mini.assert_agrees()
