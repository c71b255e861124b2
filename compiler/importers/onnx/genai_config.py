"""genai_config.json: how ONNX Runtime GenAI, and our own importer, are told about a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atsc.compiler.importers.onnx.decoder import Decoder


def genai_config(
    decoder: Decoder,
    file_name: str,
    *,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    pad_token_id: int | None,
    model_type: str = "llama",
) -> dict[str, Any]:
    """The configuration of a model that `write_decoder` wrote as `file_name`."""
    names = ["input_ids", "attention_mask"]
    if decoder.positions is not None:
        names.append("position_ids")
    inputs = {name: name for name in names}
    inputs["past_key_names"] = "past_key_values.%d.key"
    inputs["past_value_names"] = "past_key_values.%d.value"
    tokens: dict[str, Any] = {}
    if bos_token_id is not None:
        tokens["bos_token_id"] = bos_token_id
    if eos_token_ids:
        tokens["eos_token_id"] = list(eos_token_ids)
        tokens["pad_token_id"] = eos_token_ids[0] if pad_token_id is None else pad_token_id
    return {
        "model": {
            **tokens,
            "context_length": decoder.context_length,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": file_name,
                "head_size": decoder.head_size,
                "hidden_size": decoder.hidden_size,
                "inputs": inputs,
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": decoder.num_heads,
                "num_hidden_layers": len(decoder.layers),
                "num_key_value_heads": decoder.num_kv_heads,
            },
            "type": model_type,
            "vocab_size": decoder.vocab_size,
        },
        "search": {
            "do_sample": False,
            "early_stopping": True,
            "max_length": decoder.context_length,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }
