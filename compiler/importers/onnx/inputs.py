"""What each input of a decoder is: by the names that exporters give them, and by shape.

    ids          token ids [B, M]                       mask         [B, T], ones
    positions    [B, M], counted from 0                 places       the same, [M]
    past         a cache of keys or values, 4 axes      past_length  tokens in caches, one number
    flag         always 1: use the branch with a cache, compute logits of the last row

A name that says too much is harmless: what is computed from an input is proved by values later on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAMES = {
    "input_ids": "ids",
    "attention_mask": "mask",
    "position_ids": "positions",
    "use_cache_branch": "flag",
    "num_logits_to_keep": "flag",
    "logits_to_keep": "flag",
}
_POSITION_WORDS = {"pos", "position", "positions"}
_LENGTH_WORDS = {"past", "start", "offset", "cache", *_POSITION_WORDS}
_OTHER_WORDS = {"type", "types", "segment", "segments", "labels"}
"""Words in names of token ids' companions that are no token ids."""
_EXPECTED = (
    "expected are input_ids [batch, tokens], attention_mask [batch, total], position_ids "
    "[batch, tokens], and caches of keys and values with 4 axes"
)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An input as a file declares it."""

    name: str
    dims: Sequence[int | None] | None
    """None for a size that has no number; no dims at all where the file does not tell the rank."""
    is_integer: bool


def input_kinds(inputs: Iterable[ModelInput], config: Mapping[str, Any]) -> dict[str, str]:
    """Kinds by name; inputs of none are left out.

    Args:
        inputs: those that anything reads.
        config: of the model in genai_config.json, whose names come first.
    """
    given = config.get("decoder", {}).get("inputs", {})
    names = {name: kind for key, kind in _NAMES.items() for name in (key, given.get(key))}
    rest, kinds = [], {}
    for value in inputs:
        kind = names.get(value.name)
        kind = _by_words(value) if kind is None else kind if _has_rank_of(value, kind) else ""
        if kind:
            kinds[value.name] = kind
        elif value.is_integer and _has_rank_of(value, "ids") and value.name not in names:
            rest.append(value.name)
    ids = [name for name in rest if not _words(name) & _OTHER_WORDS]
    if len(ids) == 1 and "ids" not in kinds.values():
        kinds[ids[0]] = "ids"
    return kinds


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower()))


def _has_rank_of(value: ModelInput, kind: str) -> bool:
    rank = None if value.dims is None else len(value.dims)
    return kind == "flag" or rank == {"past": 4, "places": 1}.get(kind, 2)


def _by_words(value: ModelInput) -> str:
    words, dims = _words(value.name), value.dims
    if dims is None:
        return ""
    if value.is_integer and all(d == 1 for d in dims):
        return "past_length" if words & _LENGTH_WORDS else ""
    if "mask" in words:
        return "mask" if len(dims) == 2 else ""
    if words & _POSITION_WORDS:
        return {1: "places", 2: "positions"}.get(len(dims), "")
    return "past" if len(dims) == 4 and not value.is_integer and not words & {"cos", "sin"} else ""


def why_unsupported(value: ModelInput) -> str:
    """What is wrong with an input that is of no kind, and what to do."""
    words, dims = _words(value.name), value.dims
    shape = "no shape" if dims is None else f"shape {list(dims)}".replace("None", "?")
    if value.name == "inputs_embeds":
        return (
            "a plan reads token ids, not embeddings; export the model with its embedding "
            "(the builder's exclude_embeds=false)"
        )
    if "mask" in words:
        return (
            f"a mask with {shape} is computed by the caller, and may hide anything; export the "
            "model with attention_mask [batch, total], from which it computes such masks"
        )
    if words & {"cos", "sin"}:
        return (
            f"angles with {shape} are computed by the caller; export the model with position_ids "
            "[batch, tokens], from which it computes them"
        )
    if words & _OTHER_WORDS:
        return "a plan reads token ids alone; export the model without this input"
    return f"an input with {shape} and this name; {_EXPECTED}"
