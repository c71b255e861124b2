"""Rounds every matrix of a GGUF file to Q4_0, so that all engines can have the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, LlamaFileType, quants


def requantise_gguf(source: Path, target: Path) -> None:
    """Write a copy whose matrices are Q4_0, by ggml's own rounding; all keys come along."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "general.file_type":
            value = int(LlamaFileType.MOSTLY_Q4_0)
        is_array = field.types[0] is GGUFValueType.ARRAY
        writer.add_key_value(
            key, value, field.types[0], sub_type=field.types[-1] if is_array else None
        )
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.Q4_0
        writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
