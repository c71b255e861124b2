"""Converts a GGUF file to ONNX in the conventions of the GenAI builder, without loss.

Architecture llama. Everything that would change the arithmetic and is not understood (tensors,
keys, types, kinds of RoPE scaling) is refused by name. The tokenizer, the chat template and
genai_config.json go into the same folder as the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, ReaderTensor

from atsc.compiler.errors import ModelError, UsageError
from atsc.compiler.importers.file_set import new_file_set
from atsc.compiler.importers.gguf_metadata import Metadata
from atsc.compiler.importers.gguf_quants import dequantized, matrix_of, vector_of
from atsc.compiler.importers.gguf_tokenizer import (
    end_of_generation_ids,
    special_token_id,
    tokenizer_files,
)
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
from atsc.compiler.importers.onnx.genai_config import genai_config
from atsc.compiler.importers.onnx.graph_writer import Progress
from atsc.compiler.importers.onnx.write_decoder import write_decoder

_ARCHITECTURE = "llama"
_MAX_CONTEXT = 1 << 24
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "use_parallel_residual",
)


def convert_gguf(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """Write the model of a GGUF file as `target`, with its weights in `target`.data.

    The folder also gets tokenizer.json, tokenizer_config.json, chat_template.jinja and
    genai_config.json, as far as the file has them; files of these names are replaced. All files
    appear together, or none does.

    Args:
        source: the GGUF file.
        target: where the ONNX file goes; its folder is made if need be.
        progress: called with a label, bytes written and bytes in all.

    Raises:
        ModelError: the file is damaged, or holds something that is not supported.
        UsageError: the target is no .onnx file, or is a folder.
    """
    if target.suffix != ".onnx" or target.is_dir():
        raise UsageError(f"{target} is no name of an ONNX file; give one like DIR/model.onnx")
    reader = _open(source)
    metadata = Metadata(str(source), reader.fields)
    model = _GgufModel(metadata, {tensor.name: tensor for tensor in reader.tensors})
    decoder = model.decoder()
    texts = tokenizer_files(metadata)
    config = genai_config(
        decoder,
        target.name,
        bos_token_id=special_token_id(metadata, "bos"),
        eos_token_ids=end_of_generation_ids(metadata),
        pad_token_id=special_token_id(metadata, "padding"),
    )
    with new_file_set(target.parent, target.name) as files:
        for name, text in texts.items():
            files.write_text(name, text)
        files.write_text("genai_config.json", json.dumps(config, indent=2) + "\n")
        data_name = f"{target.name}.data"
        write_decoder(
            decoder,
            files.path(target.name),
            files.path(data_name),
            data_name=data_name,
            progress=progress,
        )


def _open(source: Path) -> GGUFReader:
    """Map a GGUF file; gguf-py's many exceptions for damaged files become one line."""
    try:
        reader = GGUFReader(source)
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        if GGMLQuantizationType.__name__ in str(error):
            number = re.findall(r"\d+", str(error))[-1]
            raise ModelError(
                f"{source}: a tensor is of type {number}, which is not known; requantise the file"
                " to Q4_0, Q4_1 or Q8_0"
            ) from error
        raise ModelError(
            f"{source} is no GGUF file that can be read, or is incomplete ({error}); download it"
            " again"
        ) from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise ModelError(f"{source} is a big-endian GGUF file; only little-endian ones are read")
    return reader


class _GgufModel:
    """Tensors of architecture llama, each taken once, so that those left over can be named."""

    def __init__(self, metadata: Metadata, tensors: dict[str, ReaderTensor]) -> None:
        self._metadata = metadata
        self._tensors = tensors
        self._unused = set(tensors)
        architecture = metadata.text("general.architecture")
        if architecture != _ARCHITECTURE:
            raise self._error(
                f"architecture {architecture!r} cannot be converted yet (supported:"
                f" {_ARCHITECTURE}); export the model to ONNX with another tool"
            )
        if metadata.integer("split.count", 0) > 1:
            raise self._error("is one part of a split model; merge the parts into one file first")
        for key in _UNSUPPORTED_KEYS:
            if metadata.is_set(f"{_ARCHITECTURE}.{key}"):
                raise self._error(f"the key {_ARCHITECTURE}.{key} is not supported yet")
        scaling = metadata.text(f"{_ARCHITECTURE}.rope.scaling.type", "none")
        if scaling != "none" or self._real("rope.scale_linear", 1.0) != 1.0:
            name = scaling if scaling != "none" else "linear"
            raise self._error(f"RoPE scaling of type {name!r} is not supported yet")
        self.hidden_size = self._integer("embedding_length")
        self.num_heads = self._integer("attention.head_count")
        self.num_kv_heads = self._integer("attention.head_count_kv", self.num_heads)
        self.head_size = self._head_size()

    def decoder(self) -> Decoder:
        """The whole model.

        Raises:
            ModelError: a tensor is missing, has the wrong shape, or is not understood.
        """
        embedding, head = self._embedding_and_head()
        decoder = Decoder(
            hidden_size=self.hidden_size,
            vocab_size=embedding.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            context_length=self._context_length(),
            epsilon=self._real("attention.layer_norm_rms_epsilon"),
            embedding=embedding,
            layers=tuple(self._layer(i) for i in range(self._integer("block_count"))),
            final_norm=Norm(self._vector("output_norm.weight", self.hidden_size)),
            head=head,
            rotary=Rotary(self._inverse_frequencies()),
            attention_scale=self._real("attention.scale", 0.0) or None,
        )
        if self._unused:
            names = sorted(self._unused)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise self._error(f"the tensor {names[0]}{more} is not understood")
        return decoder

    def _layer(self, index: int) -> Layer:
        block, hidden = f"blk.{index}", self.hidden_size
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        inner = self._integer("feed_forward_length")
        return Layer(
            attention_norm=Norm(self._vector(f"{block}.attn_norm.weight", hidden)),
            attention=Attention(
                q=self._linear(f"{block}.attn_q", q_size, hidden, self.num_heads),
                k=self._linear(f"{block}.attn_k", kv_size, hidden, self.num_kv_heads),
                v=self._linear(f"{block}.attn_v", kv_size, hidden),
                o=self._linear(f"{block}.attn_output", hidden, q_size),
            ),
            mlp_norm=Norm(self._vector(f"{block}.ffn_norm.weight", hidden)),
            mlp=GatedMlp(
                gate=self._linear(f"{block}.ffn_gate", inner, hidden),
                up=self._linear(f"{block}.ffn_up", inner, hidden),
                down=self._linear(f"{block}.ffn_down", hidden, inner),
            ),
        )

    def _embedding_and_head(self) -> tuple[Matrix, Matrix | None]:
        """The table and the head; None for a head that is the table.

        Rows with float zero points cannot be gathered by an ONNX operator: such a table is
        dequantised, and a tied head keeps its own quantised copy.
        """
        table = self._take("token_embd.weight")
        is_tied = "output.weight" not in self._tensors
        vocab_size = int(table.shape[-1])
        stored = self._checked(matrix_of(table), table.name, (vocab_size, self.hidden_size))
        head = None if is_tied else self._matrix("output.weight", (vocab_size, self.hidden_size))
        if table.tensor_type is not GGMLQuantizationType.Q4_1:
            return stored, head
        return dequantized(table), stored if is_tied else head

    def _inverse_frequencies(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        pairs = np.arange(0, self.head_size, 2, dtype=np.float64)
        frequencies = self._real("rope.freq_base", 10000.0) ** (-pairs / self.head_size)
        if "rope_freqs.weight" in self._tensors:
            factors = self._vector("rope_freqs.weight", self.head_size // 2)
            frequencies = frequencies / factors.astype(np.float64)
        return frequencies

    def _context_length(self) -> int:
        """Rows of the RoPE tables; a damaged number must not fill the disk."""
        length = self._integer("context_length")
        if not 1 <= length <= _MAX_CONTEXT:
            raise self._error(
                f"{_ARCHITECTURE}.context_length is {length}, expected 1 to {_MAX_CONTEXT} tokens"
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
                    f"{_ARCHITECTURE}.{key} is {found}, but heads have {size} elements; this is"
                    " not supported yet"
                )
        if size < 2 or size % 2:
            raise self._error(f"a head size of {size} has no pairs for RoPE")
        return size

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
        return self._metadata.integer(f"{_ARCHITECTURE}.{key}", default)

    def _real(self, key: str, default: float | None = None) -> float:
        return self._metadata.real(f"{_ARCHITECTURE}.{key}", default)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self._metadata.source}: {message}")
