"""Converts a GGUF file to ONNX in the conventions of the GenAI builder, without loss.

Architectures: gguf_decoder.py; types of tensors: gguf_quants.py. Everything that would change the
arithmetic and is not understood (tensors, keys, types, kinds of RoPE scaling) is refused by name.
The tokenizer, the chat template and genai_config.json go into the same folder as the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from atsc.compiler.errors import UsageError
from atsc.compiler.importers.file_set import new_file_set
from atsc.compiler.importers.gguf_decoder import GgufDecoder
from atsc.compiler.importers.gguf_file import open_gguf
from atsc.compiler.importers.gguf_tokenizer import (
    end_of_generation_ids,
    special_token_id,
    tokenizer_files,
)
from atsc.compiler.importers.onnx.genai_config import genai_config
from atsc.compiler.importers.onnx.graph_writer import Progress
from atsc.compiler.importers.onnx.write_decoder import write_decoder


@dataclass(frozen=True, slots=True)
class Conversion:
    """Bytes of the tensors in the GGUF file, and of weights and RoPE tables in the ONNX file."""

    source_bytes: int
    weight_bytes: int
    rotary_bytes: int


def convert_gguf(source: Path, target: Path, *, progress: Progress | None = None) -> Conversion:
    """Write the model of a GGUF file as `target`, with its weights in `target`.data.

    The folder also gets tokenizer.json, tokenizer_config.json, chat_template.jinja and
    genai_config.json, as far as the file has them; files of these names are replaced. All files
    appear together, or none does.

    Args:
        source: the GGUF file, or the first part of a split one.
        target: where the ONNX file goes; its folder is made if need be.
        progress: called with a label, bytes written and bytes in all.

    Raises:
        ModelError: the file is damaged, or holds something that is not supported.
        UsageError: the target is no .onnx file, or is a folder.
    """
    if target.suffix != ".onnx" or target.is_dir():
        raise UsageError(f"{target} is no name of an ONNX file; give one like DIR/model.onnx")
    file = open_gguf(source)
    metadata = file.metadata
    model = GgufDecoder(metadata, file.tensors)
    decoder = model.decoder()
    texts = tokenizer_files(metadata)
    config = genai_config(
        decoder,
        target.name,
        bos_token_id=special_token_id(metadata, "bos"),
        eos_token_ids=end_of_generation_ids(metadata),
        pad_token_id=special_token_id(metadata, "padding"),
        model_type=model.architecture.model_type,
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
        data_bytes = files.path(data_name).stat().st_size
    rotary_bytes = decoder.rotary_bytes
    return Conversion(file.num_bytes, data_bytes - rotary_bytes, rotary_bytes)
