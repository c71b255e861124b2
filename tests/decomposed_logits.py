"""What onnxruntime computes with a decoder of decomposed.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from decomposed import Decoder
from decomposed_parts import CONTEXT, KV_HEADS, LAYERS, SIZE, VOCAB, Spelling

IDS = np.random.default_rng(3).integers(0, VOCAB, 22)
PROMPT = 17


def logits_of(model: Path, spelling: Spelling) -> np.ndarray:
    """By onnxruntime: a prefill, then single steps."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # It makes MatMulNBits of DequantizeLinear, which would round activations by default.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    halves = any(v.type == "tensor(float16)" for v in session.get_inputs())
    element = np.float16 if halves else np.float32
    is_static = Decoder(spelling).is_static
    empty = np.zeros((1, KV_HEADS, CONTEXT if is_static else 0, SIZE), element)
    caches = {
        f"past_key_values.{layer}.{part}": empty
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    rows, position = [], 0
    for count in (PROMPT, *[1] * (len(IDS) - PROMPT)):
        total = position + count
        feeds = {
            "input_ids": IDS[None, position:total],
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(position, total)[None],
        }
        if spelling.whole_mask:
            feeds["attention_mask"] = (np.arange(CONTEXT) < total).astype(np.int64)[None]
        feeds |= {"num_logits_to_keep": np.array(count)} if spelling.keep_logits else {}
        feeds |= {"use_cache_branch": np.array([True])} if spelling.merged else {}
        wanted = {value.name for value in session.get_inputs()}
        given = {name: array for name, array in (feeds | caches).items() if name in wanted}
        results = dict(zip(names, session.run(names, given), strict=True))
        rows.append(results["logits"][0].astype(np.float32))
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        position = total
    return np.concatenate(rows)
