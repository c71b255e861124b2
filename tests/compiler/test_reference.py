"""The reference of `atsc verify` runs whatever decoders the importer takes."""

from __future__ import annotations

from pathlib import Path

import exporter_spellings as spellings
import numpy as np
import onnx
import pytest
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT, logits_of
from decomposed_parts import Spelling
from exporter_spellings import Change, moved_axes, renamed, retyped, with_input
from onnx import TensorProto
from onnxruntime.transformers.float16 import convert_float_to_float16

from atsc.compiler.commands.reference import Reference
from atsc.compiler.importers.onnx import import_onnx

INT64 = TensorProto.INT64
NAMES = {"input_ids": "tokens", "past_key_values": "cache_in", "present": "cache_out"}


def halves(model: onnx.ModelProto) -> None:
    model.CopyFrom(convert_float_to_float16(model, keep_io_types=False))


CASES: dict[str, tuple[type[Decoder], Spelling, list[Change]]] = {
    "plain": (Decoder, Spelling(), []),
    "rows of logits by number": (Decoder, Spelling(keep_logits=True), []),
    "merged": (Decoder, Spelling(merged=True), []),
    "caches of fixed size": (Decoder, Spelling(cache="scatter_nd"), []),
    "the mask too": (Decoder, Spelling(cache="scatter_elements", whole_mask=True), []),
    "half floats": (Decoder, Spelling(), [halves]),
    "other names": (Decoder, Spelling(), [renamed(NAMES | {"logits": "scores"})]),
    "tokens outside": (spellings.TokensOutside, Spelling(), [moved_axes([0, 2, 1, 3])]),
    "a number of past tokens": (
        spellings.CountedFromPast,
        Spelling(),
        [retyped("position_ids", INT64, [1], "start_pos")],
    ),
    "positions of one axis": (
        spellings.Places,
        Spelling(),
        [retyped("position_ids", TensorProto.INT32, ["M"], "cache_position")],
    ),
    "an input that nobody reads": (Decoder, Spelling(), [with_input("token_type_ids", ["B", "M"])]),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path: Path, name: str) -> None:
    decoder, spelling, changes = CASES[name]
    path = decoder(spelling).save(tmp_path)
    model = onnx.load(path)
    plain = Decoder(spelling).save(tmp_path)
    expected = logits_of(plain, spelling)
    for change in changes:
        change(model)
    onnx.save(model, path)
    reference = Reference(path, import_onnx(path))
    rows = [reference.forward(IDS[:PROMPT])]
    rows += [reference.forward(IDS[index : index + 1]) for index in range(PROMPT, len(IDS))]
    error = np.linalg.norm(np.concatenate(rows) - expected) / np.linalg.norm(expected)
    assert error <= (2e-3 if name == "half floats" else 1e-6)
