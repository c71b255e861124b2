"""A `Decoder` of a published shape with random int4 weights."""

from __future__ import annotations

import math

import numpy as np
from model_shapes import Shape
from random_weights import RandomWeights

from atsc.compiler.importers.onnx.decoder import (
    Attention,
    Decoder,
    GatedMlp,
    Layer,
    Linear,
    MoeMlp,
    Norm,
    PlainMlp,
)

_OPT_POSITION_OFFSET = 2


def random_decoder(
    shape: Shape, num_layers: int, context: int, seed: int, block_size: int = 32
) -> Decoder:
    """The whole model; two calls with the same arguments give the same bytes."""
    maker = _Maker(shape, RandomWeights(seed, block_size))
    random = maker.random
    embedding_gain = 2.0 if shape.is_tied else math.sqrt(shape.hidden)
    is_learned = shape.architecture == "opt"
    rows = context + _OPT_POSITION_OFFSET
    return Decoder(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        context_length=context,
        epsilon=shape.epsilon,
        embedding=random.matrix(shape.vocab, shape.hidden, gain=embedding_gain),
        layers=tuple(maker.layer(index) for index in range(num_layers)),
        final_norm=maker.norm(),
        head=None if shape.is_tied else random.matrix(shape.vocab, shape.hidden, gain=2.0),
        rotary=shape.rotary(),
        positions=random.normal(rows, shape.hidden, deviation=0.02) if is_learned else None,
        position_offset=_OPT_POSITION_OFFSET if is_learned else 0,
    )


class _Maker:
    """Layers of one shape."""

    def __init__(self, shape: Shape, random: RandomWeights) -> None:
        self.shape = shape
        self.random = random

    def norm(self) -> Norm:
        weight = self.random.normal(self.shape.hidden, mean=1.0, deviation=0.1)
        if self.shape.architecture != "opt":
            return Norm(weight)
        return Norm(weight, self.random.normal(self.shape.hidden, deviation=0.02))

    def layer(self, index: int) -> Layer:
        return Layer(self.norm(), self._attention(index), self.norm(), self._mlp())

    def _linear(self, outputs: int, inputs: int, gain: float = 1.0) -> Linear:
        matrix = self.random.matrix(outputs, inputs, gain=gain)
        if not self.shape.has_biases:
            return Linear(matrix)
        return Linear(matrix, self.random.normal(outputs, deviation=0.02))

    def _attention(self, index: int) -> Attention:
        shape = self.shape
        q_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        has_norms, has_sinks = shape.has_head_norms, shape.architecture == "gpt-oss"
        size = shape.head_size
        return Attention(
            q=self._linear(q_size, shape.hidden),
            k=self._linear(kv_size, shape.hidden),
            v=self._linear(kv_size, shape.hidden),
            o=self._linear(shape.hidden, q_size, gain=0.5),
            q_norm=self.random.normal(size, mean=1.0, deviation=0.1) if has_norms else None,
            k_norm=self.random.normal(size, mean=1.0, deviation=0.1) if has_norms else None,
            sinks=self.random.normal(shape.heads, deviation=1.0) if has_sinks else None,
            window=shape.window if index % 2 == 0 else -1,
        )

    def _mlp(self) -> GatedMlp | PlainMlp | MoeMlp:
        shape = self.shape
        if shape.experts:
            return self._moe()
        if shape.architecture == "opt":
            return PlainMlp(
                up=self._linear(shape.inner, shape.hidden),
                down=self._linear(shape.hidden, shape.inner, gain=0.5),
            )
        return GatedMlp(
            gate=self._linear(shape.inner, shape.hidden),
            up=self._linear(shape.inner, shape.hidden),
            down=self._linear(shape.hidden, shape.inner, gain=0.5),
        )

    def _moe(self) -> MoeMlp:
        shape, experts = self.shape, self.shape.experts

        def bias(*sizes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            if shape.has_biases:
                return self.random.normal(*sizes, deviation=0.02)
            return np.broadcast_to(np.float32(0), sizes)

        return MoeMlp(
            router=self.random.normal(experts, shape.hidden, deviation=shape.hidden**-0.5),
            router_bias=bias(experts) if shape.has_biases else None,
            gate_up=self.random.matrix(experts, 2 * shape.inner, shape.hidden),
            gate_up_bias=bias(experts, 2 * shape.inner),
            down=self.random.matrix(experts, shape.hidden, shape.inner, gain=0.5),
            down_bias=bias(experts, shape.hidden),
            num_chosen=shape.chosen_experts,
            swiglu_alpha=shape.swiglu_alpha,
            swiglu_beta=shape.swiglu_beta,
            swiglu_limit=shape.swiglu_limit,
        )
