"""Answers as they come: what `atsc run` and its chat share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from atsc.compiler.commands.console import Console, counted
from atsc.compiler.errors import CancelledError, UsageError

if TYPE_CHECKING:
    from atsc.compiler.commands.trace import Trace
    from atsc.runtime.loader import Plan, Session

T = TypeVar("T")

Message = Mapping[str, str]
WAKE_SECONDS = 0.1
"""Between looks at whether a long call should end."""


@dataclass(slots=True)
class Answer:
    """What was generated, and how long it took."""

    text: str
    tokens: list[int]
    num_prompt_tokens: int
    """All of the prompt; what the session held already took no time."""
    num_new_prompt_tokens: int
    prefill_seconds: float
    """Until the first token."""
    decode_seconds: float
    """From the first token to the last."""
    finish: str
    """`stop`, `length`, `context` or `interrupted`."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of the tokens that were new to the session."""
        return self.num_new_prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None below two tokens."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        rate = self.decode_tokens_per_s
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "num_prompt_tokens": self.num_prompt_tokens,
            "prefill_tokens_per_s": round(self.prefill_tokens_per_s, 2),
            "decode_tokens_per_s": None if rate is None else round(rate, 2),
        }

    def speed(self) -> str:
        """For people."""
        rate = self.decode_tokens_per_s
        return (
            f"prompt: {counted(self.num_new_prompt_tokens, 'token')}, "
            f"{self.prefill_tokens_per_s:.1f} tok/s; text: {counted(len(self.tokens), 'token')}"
            + (f", {rate:.1f} tok/s" if rate else "")
            + f" ({self.finish})"
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its tokens."""

    text: str
    ids: Sequence[int]


class Writer:
    """Generates answers in one session, reusing what it holds, and prints them as they come."""

    def __init__(
        self,
        args: argparse.Namespace,
        console: Console,
        plan: Plan,
        session: Session,
        trace: Trace | None = None,
    ) -> None:
        self._args = args
        self._console = console
        self._plan = plan
        self._session = session
        self._trace = trace
        most = args.n if args.n is not None else (-1 if args.chat else 256)
        self._most_tokens = most if most > 0 else plan.context_length
        self._held: list[int] = []
        self._told: Prompt | None = None
        """The latest prompt with its answer."""
        self._stop = False

    @property
    def num_held(self) -> int:
        """Tokens that the session holds."""
        return len(self._held)

    def stop(self) -> None:
        """End the present answer; a signal handler may call it."""
        self._stop = True

    def text_prompt(self, text: str) -> Prompt:
        """A plain prompt; an empty one is the beginning of a text."""
        ids = self._plan.tokenizer.encode(_checked(text))
        if not ids and self._plan.bos_token_id is not None:
            return Prompt(text, [self._plan.bos_token_id])
        if not ids:
            raise UsageError("the prompt is empty; give -p some text")
        return Prompt(text, ids)

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """A conversation, and the opening of the answer that comes next.

        Models write a text in other tokens than the tokenizer, at times. Where the conversation
        goes on from the latest answer, its tokens are taken as they were, so that all of them are
        reused; unless that changes the text, as a space does that tokenizers put before the first
        word.
        """
        tokenizer, told = self._plan.tokenizer, self._told
        text = _checked(tokenizer.render_chat(messages))
        ids = tokenizer.encode(text, add_special_tokens=False)
        if told and text.startswith(told.text):
            rest = tokenizer.encode(text[len(told.text) :], add_special_tokens=False)
            joined = [*told.ids, *rest]
            if self._exact_text(joined) == self._exact_text(ids):
                return Prompt(text, joined)
        return Prompt(text, ids)

    def _exact_text(self, ids: Sequence[int]) -> str:
        return self._plan.tokenizer.decode(ids, skip_special_tokens=False)

    def answer(self, prompt: Prompt) -> Answer:
        """Generate after a prompt, which is the whole text so far."""
        ids = prompt.ids
        limit = self._plan.context_length
        if len(ids) >= limit:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, and the plan's context is {limit}; "
                "shorten it, or compile with a larger --ctx"
            )
        self._stop = False
        begin = first = last = time.perf_counter()
        begin_ns = time.monotonic_ns()
        kept = self._keep(ids)
        stream = self._plan.tokenizer.stream()
        tokens: list[int] = []
        pieces: list[str] = []
        try:
            for token in self._generate(ids, kept):
                last = time.perf_counter()
                if not tokens:
                    first = last
                tokens.append(token)
                self._print(pieces, stream.push(token))
                self._tell_changes(begin_ns)
                if self._stop:
                    break
        except CancelledError:
            if not self._stop:
                raise
        finally:
            self._held = [*ids, *tokens][: self._session.position]
            if self._trace:
                self._trace.collect(self._session)
        self._print(pieces, stream.flush())
        self._tell_changes(begin_ns)
        if not tokens:
            first = last = time.perf_counter()
        text = "".join(pieces)
        self._told = Prompt(prompt.text + text, [*ids, *tokens])
        return Answer(
            text=text,
            tokens=tokens,
            num_prompt_tokens=len(ids),
            num_new_prompt_tokens=min(len(ids), self.num_held) - kept,
            prefill_seconds=first - begin,
            decode_seconds=last - first,
            finish=self._finish(len(tokens)),
        )

    def _tell_changes(self, begin_ns: int) -> None:
        """With -v: what rounds promote from now on, and why, at once."""
        if not self._console.verbose:
            return
        for change in self._plan.take_changes():
            if not self._args.json and sys.stdout.isatty() and sys.stderr.isatty():
                print(flush=True)  # not on the text's own line
            self._console.note(f"{(change.when_ns - begin_ns) / 1e9:.1f} s: {change}")

    def _finish(self, num_tokens: int) -> str:
        if self._stop:
            return "interrupted"
        if num_tokens == self._most_tokens:
            return "length"
        return "context" if self.num_held >= self._plan.context_length else "stop"

    def _keep(self, ids: Sequence[int]) -> int:
        """Rewind the session to what it shares with `ids`; at least one token is left to append."""
        kept = 0
        for ours, theirs in zip(self._held, ids[:-1], strict=False):
            if ours != theirs:
                break
            kept += 1
        try:
            self._session.rewind(kept)
        except UsageError:
            # Further back than a window's ring remembers.
            kept = 0
            self._session.rewind(0)
        return kept

    def _generate(self, ids: Sequence[int], kept: int) -> Iterator[int]:
        """Prefill chunk by chunk, for the sake of the progress bar."""
        chunk = self._plan.chunk
        while len(ids) - kept > chunk:
            part = ids[kept : kept + chunk]
            self._call(partial(self._session.prefill, part, logits="none"))
            if self._stop:
                return
            kept += chunk
            self._console.progress("reading the prompt", kept, len(ids))
        self._console.clear()
        args = self._args
        tokens = self._session.generate(
            ids[kept:],
            max_new_tokens=self._most_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
        )
        # The first token ends the prefill; those that follow are quick.
        first = self._call(lambda: next(tokens, None))
        if first is not None:
            yield first
            yield from tokens

    def _call(self, work: Callable[[], T]) -> T:
        """Run something native; signals would wait for it, so it gets a thread, and we the signals.

        Raises:
            CancelledError: `stop` was called, and it came in time.
        """
        late = False
        with futures.ThreadPoolExecutor(1, "atsc answer") as pool:
            future = pool.submit(work)
            try:
                while not self._stop and not futures.wait([future], WAKE_SECONDS).done:
                    pass
            finally:
                if not future.done():
                    self._session.cancel()
                    late = True
        result = future.result()
        if late:
            self._session.rewind(self._session.position)  # takes the cancel back
        return result

    def _print(self, pieces: list[str], text: str) -> None:
        pieces.append(text)
        if not self._args.json:
            sys.stdout.write(text)
            sys.stdout.flush()


def _checked(text: str) -> str:
    """The text, without the halves of characters that Python makes of bytes that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("the prompt is not UTF-8 text; convert it first, as iconv does") from None
    return text
