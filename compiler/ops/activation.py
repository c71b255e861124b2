"""activation and gated_activation: pointwise nonlinearities.

    activation:        y = act(x)
    gated_activation:  y = act(gate) * x

Kinds and their sources: silu x * sigmoid(x); gelu (exact, ONNX Gelu approximate="none");
gelu_tanh (ONNX Gelu approximate="tanh"); quick_gelu x * sigmoid(1.702 x) (com.microsoft QuickGelu);
relu; relu2 (squared ReLU); sigmoid; tanh. Shapes: all [M, N] float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import DType, TensorType
from atsc.compiler.ops import REQUIRED, Attrs, Cost, OpDef, Operand, RoundState, Sample

F64 = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: F64) -> F64:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


KINDS: Mapping[str, Callable[[F64], F64]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}


def apply_activation(kind: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The activation of one kind, computed in float64."""
    return KINDS[kind](x.astype(np.float64)).astype(np.float32)


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    x = inputs[0]
    assert isinstance(x, TensorType)
    return (TensorType(DType.F32, x.shape),)


def _activation(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    return (apply_activation(str(attrs["kind"]), inputs[0]),)


def _gated(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    return (apply_activation(str(attrs["kind"]), inputs[0]) * inputs[1],)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    x = inputs[0]
    assert isinstance(x, TensorType)
    elements = rows * int(x.shape[-1])
    return Cost(10 * elements, 4 * elements * len(inputs), 4 * elements)


def _samples_of(num_inputs: int) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        rng = np.random.default_rng(0)
        for kind in KINDS:
            for rows, width in ((1, 45), (17, 256)):
                x = 6 * rng.standard_normal((num_inputs, rows, width), np.float32)
                yield Sample({"kind": kind}, tuple(x))

    return samples


OPS = (
    OpDef(
        name="activation",
        inputs=("x",),
        outputs=("y",),
        attrs={"kind": REQUIRED},
        infer=_infer,
        reference=_activation,
        cost=_cost,
        samples=_samples_of(1),
        templates=("activation",),
    ),
    OpDef(
        name="gated_activation",
        inputs=("gate", "x"),
        outputs=("y",),
        attrs={"kind": REQUIRED},
        infer=_infer,
        reference=_gated,
        cost=_cost,
        samples=_samples_of(2),
        templates=("activation",),
    ),
)
