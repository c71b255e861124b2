"""The tokenizer of a GGUF file as the files of the `tokenizers` library.

Two kinds: byte-level BPE (`gpt2`), split first by the regular expressions that
`tokenizer.ggml.pre` names, and SentencePiece BPE with byte fallback (`llama`), whose scores become
merges. Source: llama.cpp's vocabulary defines what each key means; tokens agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf_metadata import Metadata

_PREFIX = "tokenizer.ggml"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_WORDS, _QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before byte-level BPE; each expression cuts the pieces of the one before."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token is taken whole."""
    adds_bos: bool = False
    """Whether BOS is added when the file does not say."""


_LLAMA3 = _Splitting((_LLAMA3_WORDS,), ignore_merges=True, adds_bos=True)
_SPLITTINGS = {
    "gpt-2": _Splitting((_GPT2_WORDS,)),
    "default": _Splitting(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "smollm": _Splitting((r"\p{N}", _GPT2_WORDS)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting((_QWEN2_WORDS,)),
}
_END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>")
)


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """File name -> text: tokenizer.json, tokenizer_config.json and, if any, chat_template.jinja.

    Empty for a file without a vocabulary.

    Raises:
        ModelError: the kind of tokenizer or of pre-tokenizer is not supported (it is named), or
            the vocabulary contradicts itself.
    """
    kind = metadata.text(f"{_PREFIX}.model", "no_vocab")
    if kind == "no_vocab":
        return {}
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(metadata)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece_bpe(metadata), True
    else:
        raise ModelError(
            f"{metadata.source}: tokenizer.ggml.model is {kind!r}, which atsc cannot convert yet"
            " (supported: gpt2, llama)"
        )
    _add_special_tokens(tokenizer, metadata)
    adds_bos = metadata.flag(f"{_PREFIX}.add_bos_token", adds_bos)
    adds_eos = metadata.flag(f"{_PREFIX}.add_eos_token", False)
    _add_template(tokenizer, metadata, adds_bos, adds_eos)
    config = {
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_names(metadata),
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if "tokenizer.chat_template" in metadata:
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template")
    return files


def special_token_id(metadata: Metadata, role: str) -> int | None:
    """The id of `bos`, `eos`, `padding`, `unknown`, ...; None if the file names none."""
    key = f"{_PREFIX}.{role}_token_id"
    return metadata.integer(key) if key in metadata else None


def end_of_generation_ids(metadata: Metadata) -> list[int]:
    """Every token that ends an answer: EOS, end of turn, end of message; EOS comes first."""
    named = [special_token_id(metadata, role) for role in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if token_id is not None]
    if f"{_PREFIX}.tokens" in metadata:
        tokens = metadata.strings(f"{_PREFIX}.tokens")
        ids += [i for i, kind in _kinds(metadata) if kind == _CONTROL and tokens[i] in _END_OF_TURN]
    return list(dict.fromkeys(ids))


def _byte_level_bpe(metadata: Metadata) -> tuple[Tokenizer, bool]:
    name = metadata.text(f"{_PREFIX}.pre", "default")
    if name not in _SPLITTINGS:
        raise ModelError(
            f"{metadata.source}: tokenizer.ggml.pre is {name!r}, which atsc cannot convert yet"
            f" (supported: {', '.join(_SPLITTINGS)})"
        )
    splitting = _SPLITTINGS[name]
    merges = []
    for merge in metadata.strings(f"{_PREFIX}.merges"):
        left, space, right = merge[1:].partition(" ")
        if not space:
            raise ModelError(f"{metadata.source}: the merge {merge!r} has one part, expected two")
        merges.append((merge[:1] + left, right))
    model = _bpe(metadata, merges, ignore_merges=splitting.ignore_merges)
    tokenizer = Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in splitting.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """Merges by score: of two adjacent pieces, the pair whose union scores highest goes first."""
    unknown = special_token_id(metadata, "unknown") or 0
    tokens = metadata.strings(f"{_PREFIX}.tokens")
    model = _bpe(
        metadata,
        list(_merges_by_score(tokens, metadata.reals(f"{_PREFIX}.scores"))),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = metadata.flag(f"{_PREFIX}.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Every split of every token into two tokens, the best-scored union first."""
    ids = {token: i for i, token in enumerate(tokens)}
    for i in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
        token = tokens[i]
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]


def _bpe(metadata: Metadata, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    tokens = metadata.strings(f"{_PREFIX}.tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ModelError(f"{metadata.source}: the vocabulary holds the token {twice!r} twice")
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # The library raises plain Exception for a merge it cannot place.
        raise ModelError(f"{metadata.source}: the tokenizer's merges are broken: {error}") from None


def _kinds(metadata: Metadata) -> list[tuple[int, int]]:
    key = f"{_PREFIX}.token_type"
    kinds = metadata.integers(key) if key in metadata else []
    expected = len(metadata.strings(f"{_PREFIX}.tokens"))
    if kinds and len(kinds) != expected:
        raise ModelError(f"{metadata.source}: {key} has {len(kinds)} entries for {expected} tokens")
    return list(enumerate(kinds))


def _add_special_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    tokens = metadata.strings(f"{_PREFIX}.tokens")
    added = [
        AddedToken(tokens[i], special=kind != _USER_DEFINED, normalized=False)
        for i, kind in _kinds(metadata)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _special_names(metadata: Metadata) -> dict[str, str]:
    """bos_token, eos_token, ... as text."""
    tokens = metadata.strings(f"{_PREFIX}.tokens")
    roles = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    names = {}
    for role, short in roles.items():
        token_id = special_token_id(metadata, role)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ModelError(
                f"{metadata.source}: {_PREFIX}.{role}_token_id is {token_id},"
                f" but the vocabulary has {len(tokens)} tokens"
            )
        names[f"{short}_token"] = tokens[token_id]
    return names


def _add_template(tokenizer: Tokenizer, metadata: Metadata, adds_bos: bool, adds_eos: bool) -> None:
    names = _special_names(metadata)
    wanted = [role for role, is_added in (("bos", adds_bos), ("eos", adds_eos)) if is_added]
    for role in wanted:
        if f"{role}_token" not in names:
            raise ModelError(
                f"{metadata.source}: a {role} token is to be added, but the key"
                f" {_PREFIX}.{role}_token_id is missing"
            )
    if not wanted:
        return
    before = [names["bos_token"]] if adds_bos else []
    after = [names["eos_token"]] if adds_eos else []
    ids = [(names[f"{role}_token"], special_token_id(metadata, role)) for role in wanted]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=ids
    )
