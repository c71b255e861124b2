"""The tensors and keys of a GGUF file as a `Decoder`, by architecture.

What the files of all of them share (llama.cpp's names, pre-norm blocks, a gated feed-forward, a
head that may be the embedding) is in `GgufDecoder`; what they do differently is data in
`Architecture`. Norm weights of Gemma are stored as 1 + w, so that nothing is left to add.
Source: llama.cpp's graphs of these architectures, of which `tests` compare the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from gguf import ReaderTensor

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf_metadata import Metadata
from atsc.compiler.importers.gguf_quants import matrix_of, vector_of
from atsc.compiler.importers.gguf_rope import plain_rotary, scaled_rotary
from atsc.compiler.importers.onnx.decoder import (
    Attention,
    Decoder,
    F32Array,
    GatedMlp,
    Layer,
    Linear,
    Matrix,
    Norm,
    Rotary,
)

_MAX_CONTEXT = 1 << 24
_WINDOW = "attention.sliding_window"
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "use_parallel_residual",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the files of one architecture have that others do not."""

    model_type: str
    """How ONNX Runtime GenAI calls it."""
    permutes_q_and_k: bool = False
    """Rows of q and k are in the order of interleaved RoPE."""
    norms_q_and_k: bool = False
    norms_updates: bool = False
    """What attention and feed-forward add to the residual is normalised."""
    scales_embedding: bool = False
    """Rows of the embedding are multiplied by sqrt(hidden size)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    window_pattern: int = 0
    """Of so many layers all but the last have a window, with a RoPE of their own; 0: none has."""
    window_rope_base: float = 0.0
    wide_scale_layers: int = 0
    """A model of so many layers scales scores by sqrt(heads / hidden size)."""


_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permutes_q_and_k=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", norms_q_and_k=True),
    "gemma3": Architecture(
        "gemma3_text",
        norms_q_and_k=True,
        norms_updates=True,
        scales_embedding=True,
        activation="gelu_tanh",
        window_pattern=6,
        window_rope_base=10000.0,
        wide_scale_layers=62,
    ),
}


class GgufDecoder:
    """Tensors of a model, each taken once, so that those left over can be named."""

    def __init__(self, metadata: Metadata, tensors: dict[str, ReaderTensor]) -> None:
        self._metadata = metadata
        self._tensors = tensors
        self._unused = set(tensors)
        self._name = metadata.text("general.architecture")
        if self._name not in _ARCHITECTURES:
            raise self._error(
                f"architecture {self._name!r} cannot be converted yet (supported:"
                f" {', '.join(_ARCHITECTURES)}); export the model to ONNX with another tool"
            )
        self.architecture = _ARCHITECTURES[self._name]
        unsupported = (*_UNSUPPORTED_KEYS, *([] if self.architecture.window_pattern else [_WINDOW]))
        for key in unsupported:
            if metadata.is_set(f"{self._name}.{key}"):
                raise self._error(f"the key {self._name}.{key} is not supported yet")
        self.hidden_size = self._integer("embedding_length")
        self.num_heads = self._integer("attention.head_count")
        self.num_kv_heads = self._integer("attention.head_count_kv", self.num_heads)
        self.head_size = self._head_size()
        self.num_layers = self._integer("block_count")
        self.has_window = self._windows()

    def decoder(self) -> Decoder:
        """The whole model.

        Raises:
            ModelError: a tensor is missing, has the wrong shape, or is not understood.
        """
        embedding, head = self._embedding_and_head()
        rotary, window_rotary = self._rotaries()
        decoder = Decoder(
            hidden_size=self.hidden_size,
            vocab_size=embedding.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            context_length=self._context_length(),
            epsilon=self._real("attention.layer_norm_rms_epsilon"),
            embedding=embedding,
            layers=tuple(self._layer(i) for i in range(self.num_layers)),
            final_norm=self._norm("output_norm"),
            head=head,
            rotary=rotary,
            window_rotary=window_rotary,
            embedding_scale=math.sqrt(self.hidden_size)
            if self.architecture.scales_embedding
            else 1,
            attention_scale=self._attention_scale(),
        )
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise self._error(f"the tensor {names[0]}{more} is not understood")
        return decoder

    def _layer(self, index: int) -> Layer:
        block, hidden = f"blk.{index}", self.hidden_size
        inner = self._integer("feed_forward_length")
        has_post_norms = self.architecture.norms_updates
        return Layer(
            attention_norm=self._norm(f"{block}.attn_norm"),
            attention=self._attention(block, self.has_window[index]),
            attention_post_norm=(
                self._norm(f"{block}.post_attention_norm") if has_post_norms else None
            ),
            mlp_norm=self._norm(f"{block}.ffn_norm"),
            mlp=GatedMlp(
                gate=self._linear(f"{block}.ffn_gate", inner, hidden),
                up=self._linear(f"{block}.ffn_up", inner, hidden),
                down=self._linear(f"{block}.ffn_down", hidden, inner),
                activation=self.architecture.activation,
            ),
            mlp_post_norm=self._norm(f"{block}.post_ffw_norm") if has_post_norms else None,
        )

    def _attention(self, block: str, has_window: bool) -> Attention:
        hidden, size = self.hidden_size, self.head_size
        q_size, kv_size = self.num_heads * size, self.num_kv_heads * size
        permuted = self.architecture.permutes_q_and_k
        q_heads, k_heads = (self.num_heads, self.num_kv_heads) if permuted else (0, 0)
        is_normed = self.architecture.norms_q_and_k
        return Attention(
            q=self._linear(f"{block}.attn_q", q_size, hidden, q_heads),
            k=self._linear(f"{block}.attn_k", kv_size, hidden, k_heads),
            v=self._linear(f"{block}.attn_v", kv_size, hidden),
            o=self._linear(f"{block}.attn_output", hidden, q_size),
            q_norm=self._vector(f"{block}.attn_q_norm.weight", size) if is_normed else None,
            k_norm=self._vector(f"{block}.attn_k_norm.weight", size) if is_normed else None,
            window=self._integer(_WINDOW) if has_window else -1,
        )

    def _windows(self) -> list[bool]:
        """Which layers have a window."""
        pattern, key = self.architecture.window_pattern, f"{self._name}.{_WINDOW}"
        if not pattern or not self._metadata.is_set(key):
            return [False] * self.num_layers
        window = self._integer(_WINDOW)
        if window < 1:
            raise self._error(f"the key {key} is {window}, expected at least 1 token")
        key += "_pattern"
        if self._metadata.is_list(key):
            flags = self._metadata.flags(key)
            if len(flags) != self.num_layers:
                raise self._error(
                    f"the key {key} has {len(flags)} entries for {self.num_layers} layers"
                )
            return flags
        pattern = self._metadata.integer(key, pattern)
        if pattern < 1:
            raise self._error(f"the key {key} is {pattern}, expected at least 1 layer")
        return [index % pattern < pattern - 1 for index in range(self.num_layers)]

    def _attention_scale(self) -> float | None:
        given = self._real("attention.scale", 0.0)
        if not given and self.num_layers == self.architecture.wide_scale_layers:
            return math.sqrt(self.num_heads / self.hidden_size)
        return given or None

    def _embedding_and_head(self) -> tuple[Matrix, Matrix | None]:
        """The table and the head; None for a head that is the table."""
        table = self._take("token_embd.weight")
        is_tied = "output.weight" not in self._tensors
        vocab_size = int(table.shape[-1])
        stored = self._checked(matrix_of(table), table.name, (vocab_size, self.hidden_size))
        head = None if is_tied else self._matrix("output.weight", (vocab_size, self.hidden_size))
        return stored, head

    def _rotaries(self) -> tuple[Rotary, Rotary | None]:
        """RoPE of the layers, and that of the layers with a window where it is another."""
        factors = None
        if "rope_freqs.weight" in self._tensors:
            factors = self._vector("rope_freqs.weight", self.head_size // 2)
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise self._error("the tensor rope_freqs.weight holds factors that are not > 0")
        rotary = scaled_rotary(self._metadata, self._name, self.head_size, factors)
        if not any(self.has_window):
            return rotary, None
        base = self._real("rope.freq_base_swa", self.architecture.window_rope_base)
        return rotary, plain_rotary(self.head_size, base)

    def _context_length(self) -> int:
        """Rows of the RoPE tables; a damaged number must not fill the disk."""
        length = self._integer("context_length")
        if not 1 <= length <= _MAX_CONTEXT:
            raise self._error(
                f"{self._name}.context_length is {length}, expected 1 to {_MAX_CONTEXT} tokens"
            )
        return length

    def _head_size(self) -> int:
        """D, the same for q, k, v and RoPE."""
        if min(self.num_heads, self.num_kv_heads) < 1 or self.num_heads % self.num_kv_heads:
            raise self._error(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads"
            )
        size = self._integer("attention.key_length", self.hidden_size // self.num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            found = self._integer(key, size)
            if found != size:
                raise self._error(
                    f"{self._name}.{key} is {found}, but heads have {size} elements; this is"
                    " not supported yet"
                )
        if size < 2 or size % 2:
            raise self._error(f"a head size of {size} has no pairs for RoPE")
        return size

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(f"{name}.weight", self.hidden_size))

    def _linear(self, name: str, outputs: int, inputs: int, num_heads: int = 0) -> Linear:
        matrix = self._matrix(f"{name}.weight", (outputs, inputs), num_heads)
        if f"{name}.bias" not in self._tensors:
            return Linear(matrix)
        return Linear(matrix, self._vector(f"{name}.bias", outputs, num_heads))

    def _matrix(self, name: str, shape: tuple[int, int], num_heads: int = 0) -> Matrix:
        return self._checked(matrix_of(self._take(name), num_heads=num_heads), name, shape)

    def _vector(self, name: str, size: int, num_heads: int = 0) -> F32Array:
        vector = vector_of(self._take(name), num_heads=num_heads)
        if len(vector) != size:
            raise self._error(f"tensor {name}: expected {size} elements, found {len(vector)}")
        return vector

    def _checked(self, matrix: Matrix, name: str, shape: tuple[int, int]) -> Matrix:
        if matrix.shape != shape:
            raise self._error(
                f"tensor {name}: expected {shape[0]} x {shape[1]} (outputs x inputs), found"
                f" {matrix.shape[0]} x {matrix.shape[1]}"
            )
        return matrix

    def _take(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise self._error(f"the tensor {name} is missing; the file is incomplete")
        self._unused.discard(name)
        return self._tensors[name]

    def _integer(self, key: str, default: int | None = None) -> int:
        return self._metadata.integer(f"{self._name}.{key}", default)

    def _real(self, key: str, default: float | None = None) -> float:
        return self._metadata.real(f"{self._name}.{key}", default)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self._metadata.source}: {message}")
