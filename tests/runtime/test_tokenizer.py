"""Streaming text and chat templates, with a small byte-level tokenizer made here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_manifest

from atsc.compiler.errors import PlanError, UsageError
from atsc.runtime.loader import load
from atsc.runtime.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TEXT = "Grüße, 世界! 👋🏽 naïve\n\tcafé — 'done'  "


def _definition() -> bytes:
    """Byte-level BPE without merges: every byte is a token, so characters come in pieces."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    text: str = made.to_str()
    return text.encode()


def _tokenizer(config: dict[str, Any] | None = None, template: str | None = None) -> Tokenizer:
    return Tokenizer(_definition(), config or {}, template)


def test_text_survives_the_round_trip() -> None:
    tokenizer = _tokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids[1:] == tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == "<s>"


def test_stream_gives_whole_characters() -> None:
    tokenizer = _tokenizer()
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(TEXT) and pieces.count("") > 10


def test_stream_shows_broken_characters_at_the_end() -> None:
    tokenizer = _tokenizer()
    ids = tokenizer.encode("a世", add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids[:-1]) == "a"
    assert "\ufffd" in stream.flush()
    assert stream.flush() == ""


def test_stream_keeps_spaces_of_sentencepiece_tokens() -> None:
    """Their decoder strips the first space of whatever it is given."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁Hello": 0, "▁big": 1, "▁world": 2, "!": 3}, unk_token="!")
    )
    made.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(made.to_str().encode(), {})
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (0, 1, 2, 3)] == ["Hello", " big", " world", "!"]


def test_chat_template() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}\n"
        "    {% if m.role == 'stop' %}{% break %}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    messages = [{"role": "user", "content": " hi <b>"}, {"role": "stop", "content": "x"}]
    expected = "<s><|user|>hi <b></s>\n<|stop|>x</s>\n"
    tokenizer = _tokenizer(config, template)
    assert tokenizer.render_chat(messages).replace("\n\n", "\n") == expected + "<|assistant|>"
    in_config = _tokenizer({**config, "chat_template": template})
    without = in_config.render_chat(messages, add_generation_prompt=False)
    assert without.replace("\n\n", "\n") == expected
    named = _tokenizer({"chat_template": [{"name": "default", "template": "named"}]})
    assert named.render_chat([]) == "named"


def test_chat_templates_that_refuse_or_reach_out() -> None:
    for template, message in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{% for %}", "refuses the messages"),
    ):
        with pytest.raises(UsageError, match=message):
            _tokenizer(template=template).render_chat([])
    with pytest.raises(UsageError, match="no chat template"):
        _tokenizer().render_chat([])


def test_damaged_definition() -> None:
    with pytest.raises(PlanError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(b"{}", {})


@pytest.mark.toolchain
def test_tokenizer_of_a_plan(tiny_folder: Path, tmp_path: Path) -> None:
    with load(tiny_folder) as plan, pytest.raises(PlanError, match=r"has no tokenizer\.json"):
        _ = plan.tokenizer
    folder = shutil.copytree(tiny_folder, tmp_path / "with text.atsplan")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_bytes(_definition())
    (folder / "tokenizer/chat_template.jinja").write_text("{{ messages[0].content }}é")
    save_manifest(folder, "tiny")
    with load(folder) as plan:
        assert plan.tokenizer is plan.tokenizer
        assert plan.tokenizer.decode(plan.tokenizer.encode(TEXT)) == TEXT
        assert plan.tokenizer.render_chat([{"content": "x"}]) == "xé"


@pytest.mark.toolchain
def test_python_example(tiny_folder: Path, tmp_path: Path) -> None:
    """The tiny vocabulary has 32 tokens: a tokenizer of as many letters."""
    letters = {chr(ord("A") + index): index for index in range(32)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="A"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    folder = shutil.copytree(tiny_folder, tmp_path / "letters.atsplan")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text(made.to_str())
    save_manifest(folder, "tiny")
    with load(folder) as plan:
        ids = plan.tokenizer.encode("BCD")
        tokens = plan.generate(ids, max_new_tokens=64, temperature=0.7, top_p=0.9, seed=0)
        expected = plan.tokenizer.decode(list(tokens))
    example = Path(__file__).parents[2] / "examples" / "python" / "generate.py"
    shown = subprocess.run(
        [sys.executable, str(example), str(folder), "BCD"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == expected + "\n" and expected
    for arguments, message in (
        ([], "usage: "),
        ([tmp_path / "absent", "x"], f"{tmp_path / 'absent'}: no such plan"),
    ):
        shown = subprocess.run(
            [sys.executable, str(example), *arguments], capture_output=True, text=True, check=False
        )
        assert (shown.returncode, shown.stderr.count("\n")) == (1, 1)
        assert shown.stderr.startswith(message)
