"""Writes a `Decoder` of int4 blocks of 32 as GGUF Q4_0: the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from model_shapes import Shape, Yarn
from numpy.typing import NDArray

from atsc.compiler.importers.onnx.decoder import (
    Attention,
    Decoder,
    GatedMlp,
    Linear,
    Matrix,
    MoeMlp,
)

Bytes = NDArray[np.uint8]
_BLOCK = np.dtype([("scale", np.float16), ("codes", np.uint64, 2)])
_BLOCK_BYTES = _BLOCK.itemsize
_PIECE_BLOCKS = 1 << 14


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What one tensor's bytes come from."""

    num_bytes: int
    chunks: Callable[[], Iterator[NDArray[np.generic]]]


def write_gguf(decoder: Decoder, shape: Shape, name: str, path: Path) -> None:
    """Stream a model to a file; it has no vocabulary, and peers are given token ids."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    tensors = _Tensors(writer, decoder, shape)
    _add_keys(writer, decoder, shape, name)
    tensors.declare()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    stream = writer.fout[0]
    for tensor in tensors.declared:
        writer.write_padding(stream, stream.tell())
        written = 0
        for chunk in tensor.chunks():
            written += stream.write(np.ascontiguousarray(chunk).data.cast("B"))
        assert written == tensor.num_bytes
        writer.write_padding(stream, written)
    writer.close()


def _add_keys(writer: gguf.GGUFWriter, decoder: Decoder, shape: Shape, name: str) -> None:
    writer.add_name(f"random-{name}")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(decoder.vocab_size)
    writer.add_block_count(len(decoder.layers))
    writer.add_context_length(decoder.context_length)
    writer.add_embedding_length(decoder.hidden_size)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(decoder.num_heads)
    writer.add_head_count_kv(decoder.num_kv_heads)
    writer.add_key_length(decoder.head_size)
    writer.add_value_length(decoder.head_size)
    writer.add_rope_dimension_count(decoder.head_size)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(decoder.epsilon)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen_experts)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.window > 0:
        writer.add_sliding_window(shape.window)
    if isinstance(shape.scaling, Yarn):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(shape.scaling.original_context)


class _Tensors:
    """Declares tensors in GGUF's names; their bytes follow in the same order."""

    def __init__(self, writer: gguf.GGUFWriter, decoder: Decoder, shape: Shape) -> None:
        self.declared: list[_Tensor] = []
        self._writer = writer
        self._decoder = decoder
        self._shape = shape

    def declare(self) -> None:
        """Everything."""
        decoder = self._decoder
        self._matrix("token_embd.weight", decoder.embedding)
        factors = self._shape.rope_factors()
        if factors is not None:
            self._floats("rope_freqs.weight", factors)
        is_gpt_oss = self._shape.architecture == "gpt-oss"
        mlp_norm = "post_attention_norm" if is_gpt_oss else "ffn_norm"
        for index, layer in enumerate(decoder.layers):
            block = f"blk.{index}"
            self._floats(f"{block}.attn_norm.weight", layer.attention_norm.weight)
            self._attention(block, layer.attention)
            self._floats(f"{block}.{mlp_norm}.weight", layer.mlp_norm.weight)
            if isinstance(layer.mlp, MoeMlp):
                self._moe(block, layer.mlp)
            else:
                assert isinstance(layer.mlp, GatedMlp), "GGUF has no architecture for this"
                self._linear(f"{block}.ffn_gate", layer.mlp.gate)
                self._linear(f"{block}.ffn_up", layer.mlp.up)
                self._linear(f"{block}.ffn_down", layer.mlp.down)
        self._floats("output_norm.weight", decoder.final_norm.weight)
        if decoder.head is not None:
            self._matrix("output.weight", decoder.head)

    def _attention(self, block: str, attention: Attention) -> None:
        is_llama = self._shape.architecture == "llama"
        heads, kv_heads = self._decoder.num_heads, self._decoder.num_kv_heads
        self._linear(f"{block}.attn_q", attention.q, heads if is_llama else 0)
        self._linear(f"{block}.attn_k", attention.k, kv_heads if is_llama else 0)
        self._linear(f"{block}.attn_v", attention.v)
        self._linear(f"{block}.attn_output", attention.o)
        if attention.q_norm is not None and attention.k_norm is not None:
            self._floats(f"{block}.attn_q_norm.weight", attention.q_norm)
            self._floats(f"{block}.attn_k_norm.weight", attention.k_norm)
        if attention.sinks is not None:
            self._floats(f"{block}.attn_sinks.weight", attention.sinks)

    def _moe(self, block: str, moe: MoeMlp) -> None:
        self._floats(f"{block}.ffn_gate_inp.weight", moe.router)
        self._matrix(f"{block}.ffn_gate_exps.weight", moe.gate_up, part=(0, 2))
        self._matrix(f"{block}.ffn_up_exps.weight", moe.gate_up, part=(1, 2))
        self._matrix(f"{block}.ffn_down_exps.weight", moe.down)
        if moe.router_bias is not None:
            self._floats(f"{block}.ffn_gate_inp.bias", moe.router_bias)
            self._floats(f"{block}.ffn_gate_exps.bias", moe.gate_up_bias[:, 0::2])
            self._floats(f"{block}.ffn_up_exps.bias", moe.gate_up_bias[:, 1::2])
            self._floats(f"{block}.ffn_down_exps.bias", moe.down_bias)

    def _linear(self, name: str, linear: Linear, permuted_heads: int = 0) -> None:
        self._matrix(f"{name}.weight", linear.matrix, permuted_heads)
        if linear.bias is not None:
            self._floats(f"{name}.bias", linear.bias)

    def _matrix(
        self, name: str, matrix: Matrix, permuted_heads: int = 0, part: tuple[int, int] = (0, 1)
    ) -> None:
        """Every `part[1]`th row, from row `part[0]` on."""
        *outer, rows, width = matrix.shape
        shape = (*outer, rows // part[1], width // 32 * _BLOCK_BYTES)
        num_bytes = int(np.prod(shape))
        self._writer.add_tensor_info(
            name, shape, np.dtype(np.uint8), num_bytes, GGMLQuantizationType.Q4_0
        )
        step = slice(part[0], None, part[1])

        def chunks() -> Iterator[Bytes]:
            pieces = (blocks[step] for blocks in _q4_0(matrix))
            if not permuted_heads:
                return pieces
            whole = np.concatenate(list(pieces))
            halves = whole.reshape(permuted_heads, 2, rows // permuted_heads // 2, -1)
            return iter([halves.swapaxes(1, 2)])

        self.declared.append(_Tensor(num_bytes, chunks))

    def _floats(self, name: str, values: NDArray[np.float32]) -> None:
        array = np.ascontiguousarray(values, np.float32)
        self._writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
        self.declared.append(_Tensor(array.nbytes, lambda: iter([array])))


def _q4_0(matrix: Matrix) -> Iterator[Bytes]:
    """Rows as ggml's blocks: fp16 scale, then byte j holds the elements j and j + 16.

    Works on pieces that stay in the cache, an even number of rows each, eight bytes at a time.
    """
    low, high, shift = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(4)
    for codes, scales in zip(matrix.parts["codes"](), matrix.parts["scales"](), strict=True):
        step = max(2, _PIECE_BLOCKS // scales.shape[1] // 2 * 2)
        for start in range(0, len(scales), step):
            halves = codes[start : start + step].view(np.uint64)
            first, last = halves[..., 0], halves[..., 1]  # Elements 0 to 15 and 16 to 31.
            even = (first & low) | ((last & low) << shift)
            odd = ((first & high) >> shift) | (last & high)
            pairs = even.view(np.uint8) | (odd.view(np.uint8).astype(np.uint16) << 8)
            blocks = np.empty(even.shape, _BLOCK)
            blocks["scale"] = scales[start : start + step]
            blocks["codes"] = pairs.view(np.uint64).reshape(*even.shape, 2)
            yield blocks.view(np.uint8)
