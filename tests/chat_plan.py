"""The tiny plan with a tokenizer and a chat template: 30 characters, one token each."""

from __future__ import annotations

from pathlib import Path

import tiny_model

CHARACTERS = "abcdefghijklmnopqrstuvwxyz \n:."
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def build_chat_plan(directory: Path) -> Path:
    """A whole plan folder that a chat can run."""
    tiny_model.build_plan(directory)
    write_tokenizer(directory)
    tiny_model.save_manifest(directory, "tiny")
    return directory


def write_tokenizer(directory: Path) -> None:
    """Into a plan folder, whose manifest is then to be saved again."""
    from tokenizers import Tokenizer, decoders, models

    folder = directory / "tokenizer"
    folder.mkdir()
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
