"""Text to tokens and back: the plan's tokenizer.json, its chat template, and streaming."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from atsc.compiler import plan as manifests
from atsc.compiler.check_plan import read_file
from atsc.compiler.errors import PlanError, UsageError

FOLDER = "tokenizer"
_INSTALL = 'pip install "atsc[run]"'


def load_tokenizer(directory: Path, manifest: manifests.Manifest) -> Tokenizer:
    """The tokenizer of a plan.

    Raises:
        PlanError: the plan has none, or it is damaged.
        UsageError: the package `tokenizers` is not installed.
    """

    def read(name: str) -> bytes | None:
        path = f"{FOLDER}/{name}"
        if path not in manifest.files:
            return None
        return read_file(directory, manifest, path)

    definition = read("tokenizer.json")
    if definition is None:
        raise PlanError(
            f"{directory}: has no tokenizer.json; put one beside the model and compile it again, "
            "or work with token ids"
        )
    config = json.loads(read("tokenizer_config.json") or b"{}")
    template = read("chat_template.jinja")
    return Tokenizer(definition, config, template.decode() if template else None)


class Tokenizer:
    """Encodes text, decodes tokens, and writes conversations as the model expects them."""

    def __init__(
        self, definition: bytes, config: Mapping[str, Any], chat_template: str | None = None
    ) -> None:
        """Args: tokenizer.json, the content of tokenizer_config.json, and a jinja2 template."""
        try:
            import tokenizers
        except ImportError:
            raise UsageError(f"text needs the package tokenizers: {_INSTALL}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(definition)
        except Exception as error:  # the library raises plain Exception
            raise PlanError(f"{FOLDER}/tokenizer.json cannot be read: {error}") from None
        self._config = config
        self.chat_template = chat_template or _template_of(config)
        """A jinja2 template, or None."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; by default with what the model wants around a text (such as its BOS)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of some tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self) -> TextStream:
        """Decodes tokens as they come."""
        return TextStream(self)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """A conversation as the model's chat template writes it.

        Encode the result with `add_special_tokens=False`: templates write those themselves.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: further variables of the template.

        Raises:
            UsageError: no template, jinja2 is missing, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise UsageError("the model has no chat template; give it plain text instead")
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise UsageError(f"chat needs the package jinja2: {_INSTALL}") from None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        values = {
            **{name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token")},
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return environment.from_string(self.chat_template).render(values)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from None


class TextStream:
    """Text of a growing row of tokens: a character appears when its last byte is there.

    Tokens change their text with their neighbours (spaces, partial UTF-8), so a window of a few
    tokens is decoded again and what is new at its end is given out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        """Tokens of the window whose text is out already."""

    def push(self, token: int) -> str:
        """The text that this token completes; often it is empty."""
        self._window.append(token)
        before, after = self._texts()
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end, broken characters too."""
        before, after = self._texts()
        self._window, self._shown = [], 0
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._window[: self._shown]), decode(self._window)


def _template_of(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str:
    """A special token of tokenizer_config.json: a string, or an object that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"the chat template refuses the messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
