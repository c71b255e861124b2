"""The tiny plan with a tokenizer and a chat template: 30 characters, one token each."""

from __future__ import annotations

from pathlib import Path

import tiny_model

CHARACTERS = "abcdefghijklmnopqrstuvwxyz \n:."
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


def build_chat_plan(directory: Path) -> Path:
    """A whole plan folder that a chat can run."""
    from tokenizers import Tokenizer, decoders, models

    tiny_model.build_plan(directory)
    folder = directory / "tokenizer"
    folder.mkdir()
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tiny_model.save_manifest(directory, "tiny")
    return directory
