"""A decoder-only model as data, before it is written as ONNX: what `write_decoder` takes.

Matrices are lazy: their parts are iterators of row chunks, so that a model of any size is described
in a few kilobytes and streamed when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import DType, FloatFormat, Format

Array = NDArray[np.generic]
F32Array = NDArray[np.float32]
Chunks = Callable[[], Iterator[Array]]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [..., N, K], outputs first, that can be read again and again in chunks of rows.

    `parts` has the names and layouts of `atsc.compiler.ir.Weight`: `data` (bf16 as uint16), or
    `codes`, `scales` and, where the format has them, `zero_points`. Scales and zero points are
    written as float32, whatever float type the chunks have. The row chunks of a part, one after
    the other, are its C-order bytes.
    """

    shape: tuple[int, ...]
    format: Format
    parts: Mapping[str, Chunks]

    def part_shape(self, part: str) -> tuple[int, ...]:
        """The shape of one part as it is stored."""
        *outer, width = self.shape
        if isinstance(self.format, FloatFormat):
            return self.shape
        blocks = -(-width // self.format.block_size)
        if part == "codes":
            return (*outer, blocks, self.format.block_size * self.format.bits // 8)
        return (*outer, blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts as they are written."""
        size = {"codes": 1, "scales": 4, "zero_points": 4, "data": 4}
        if self.format in (FloatFormat(DType.F16), FloatFormat(DType.BF16)):
            size["data"] = 2
        return sum(int(np.prod(self.part_shape(part))) * size[part] for part in self.parts)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [N, K] and its bias [N]."""

    matrix: Matrix
    bias: F32Array | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm if there is a bias."""

    weight: F32Array
    bias: F32Array | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with its four projections.

    Rows of q and k are in the order of half-rotated RoPE (`rotary_interleaved` 0). `q_norm` and
    `k_norm` are RMSNorm weights [D]; `sinks` is [H]; `window` is the number of tokens that a row
    sees, itself included, -1 for all.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: F32Array | None = None
    k_norm: F32Array | None = None
    sinks: F32Array | None = None
    window: int = -1


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), `activation` being `silu` or `gelu_tanh`."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(relu(up(x)))."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A mixture of gated experts, as com.microsoft QMoE has it.

    `router` [E, K] float; `gate_up` [E, 2 I, K] with the rows g0, u0, g1, u1, ...; `down`
    [E, N, I]; biases [E, 2 I] and [E, N], zeros where the model has none.
    """

    router: F32Array
    router_bias: F32Array | None
    gate_up: Matrix
    gate_up_bias: F32Array
    down: Matrix
    down_bias: F32Array
    num_chosen: int
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    swiglu_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: norm, attention, norm, feed-forward, with two residual sums.

    Gemma normalises what attention and feed-forward add to the residual once more (RMSNorm).
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMlp | PlainMlp | MoeMlp
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE: radians a position for each pair [D / 2], and the factor of YaRN on cos and sin."""

    inverse_frequencies: NDArray[np.float64]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole decoder-only model.

    Attributes:
        embedding: [vocab, hidden], rows gathered by token id.
        embedding_scale: what the rows are multiplied by.
        positions: a learned position table [context + position_offset, hidden].
        rotary: None for learned positions.
        window_rotary: of the layers with a window; None: the same as of the others.
        head: None where the embedding matrix is the head too (tied).
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_length: int
    epsilon: float
    embedding: Matrix
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Matrix | None
    rotary: Rotary | None
    positions: F32Array | None = None
    position_offset: int = 0
    embedding_scale: float = 1.0
    window_rotary: Rotary | None = None
    attention_scale: float | None = None
    """None: head_size ** -0.5."""

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotary_bytes(self) -> int:
        """Bytes of all tables of cos and sin."""
        pairs = (r.inverse_frequencies for r in (self.rotary, self.window_rotary) if r is not None)
        return sum(2 * 4 * self.context_length * len(frequencies) for frequencies in pairs)

    def num_bytes(self) -> int:
        """Bytes of all matrices as they are written; norms, biases and tables are not counted."""
        return sum(matrix.num_bytes for matrix in self.matrices())

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix once."""
        yield self.embedding
        for layer in self.layers:
            attention = layer.attention
            for linear in (attention.q, attention.k, attention.v, attention.o):
                yield linear.matrix
            match layer.mlp:
                case GatedMlp(gate, up, down):
                    yield from (gate.matrix, up.matrix, down.matrix)
                case PlainMlp(up, down):
                    yield from (up.matrix, down.matrix)
                case MoeMlp():
                    yield from (layer.mlp.gate_up, layer.mlp.down)
        if self.head is not None:
            yield self.head
