"""A plan made up of Python: what commands ask of it is logged, and its text is predictable."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from atsc.compiler.errors import CancelledError, UsageError

CONTEXT, CHUNK = 40, 8
EOS = 0


class FakeStream:
    """Holds back every character until the next token comes."""

    text_of: ClassVar[dict[int, str]] = {}
    """Of tokens that are no characters."""

    def __init__(self) -> None:
        self.waiting = ""

    def push(self, token: int) -> str:
        out, self.waiting = self.waiting, self.text_of.get(token, chr(token))
        return out

    def flush(self) -> str:
        out, self.waiting = self.waiting, ""
        return out


class FakeTokenizer:
    """A character is its code."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>"

    def stream(self) -> FakeStream:
        return FakeStream()


class FakeSession:
    """Repeats the last character of the prompt as digits 1, 2, ... and stops after `stop_at`."""

    stop_at = 100
    remembers = 10**9
    """Tokens that a rewind may take back."""
    hangs = False

    def __init__(self) -> None:
        self.held: list[int] = []
        self.log: list[Any] = []
        self.slow = threading.Event()
        """Set by `prefill` when it waits, if `hangs` is set, for `cancel`."""
        self.cancelled = threading.Event()

    @property
    def position(self) -> int:
        return len(self.held)

    def prefill(self, ids: Sequence[int], logits: str = "last") -> None:
        self.log.append(("prefill", len(ids), logits))
        if self.hangs:
            self.slow.set()
            assert self.cancelled.wait(30)
            raise CancelledError("cancelled")
        self.held += list(ids)
        assert len(self.held) <= CONTEXT

    def decode(self, token: int, *, copy: bool = True) -> None:
        self.log.append(("decode", token))
        self.held.append(token)
        assert len(self.held) <= CONTEXT

    def cancel(self) -> None:
        self.cancelled.set()

    def rewind(self, position: int) -> None:
        if position and len(self.held) - position > self.remembers:
            raise UsageError("forgotten")
        self.log.append(("rewind", position))
        self.held = self.held[:position]

    def generate(self, ids: Sequence[int], **options: Any) -> Iterator[int]:
        self.log.append(("generate", len(ids), options))
        self.held += list(ids)
        for index in range(min(options["max_new_tokens"], self.stop_at)):
            token = ord("1") + index
            yield token
            if len(self.held) >= CONTEXT:
                return
            self.held.append(token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("closed")


class FakePlan:
    model_name, vocab_size, context_length, chunk = "fake", 50, CONTEXT, CHUNK
    num_threads, isa, bos_token_id = 2, "avx2", None
    device_bytes = 0
    tokenizer = FakeTokenizer()
    manifest = SimpleNamespace(memory=SimpleNamespace(weights_bytes=3 << 20))

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.options: dict[str, Any] = {}

    def session(self) -> FakeSession:
        self.sessions.append(FakeSession())
        return self.sessions[-1]

    def take_changes(self) -> list[Any]:
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
