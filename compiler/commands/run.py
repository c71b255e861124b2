"""`atsc run`: text out of a plan, as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import Console, NotYet, at_least, between, existing
from atsc.compiler.errors import PlanError, UsageError

if TYPE_CHECKING:
    from atsc.runtime.loader import Plan, Session

Messages = list[Mapping[str, str]]


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "run", help="generate text", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="`-` reads it from stdin")
    parser.add_argument(
        "--chat", action="store_true", help="use the chat template; without -p, converse"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument(
        "-n", type=at_least(1), default=256, metavar="N", help="most new tokens (256)"
    )
    parser.add_argument("--temperature", type=between(0, 100), default=0.0, help="0: the likeliest")
    parser.add_argument("--top-k", type=at_least(0), default=0, help="0: all")
    parser.add_argument("--top-p", type=between(0, 1), default=1.0)
    parser.add_argument("--min-p", type=between(0, 1), default=0.0)
    parser.add_argument("--seed", type=at_least(0), help="the same seed gives the same text")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: one a core")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--trace", action=NotYet, instead="`atsc bench` measures speed")
    parser.add_argument("--vram", action=NotYet, instead="plans run on the CPU for now")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    if args.prompt is None and (not args.chat or args.json):
        hint = "--json takes one prompt" if args.chat else "or converse with --chat"
        raise UsageError(f"give a prompt with -p TEXT; {hint}")
    if args.system and not args.chat:
        raise UsageError("--system belongs to --chat; without it, write all of the prompt yourself")
    directory = existing(args.plan, "plan folder", PlanError)
    from atsc.runtime import loader

    with loader.load(directory, threads=args.threads) as plan, plan.session() as session:
        if console.verbose:
            console.note(f"{plan.model_name}: {plan.num_threads} threads, {plan.isa} kernels")
        writer = Writer(args, console, plan, session)
        if args.prompt is None:
            _converse(writer, args.system)
            return 0
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        ids = writer.chat_ids(_opening(args.system), text) if args.chat else writer.text_ids(text)
        answer = writer.answer(ids)
    if args.json:
        console.result({"prompt": text, **answer.document()}, "")
    else:
        print(flush=True)
        console.note(answer.speed())
    return 0


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
    """`stop`, `length` or `context`."""

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
            f"prompt: {self.num_new_prompt_tokens} tokens, {self.prefill_tokens_per_s:.1f} tok/s; "
            f"text: {len(self.tokens)} tokens"
            + (f", {rate:.1f} tok/s" if rate else "")
            + f" ({self.finish})"
        )


class Writer:
    """Generates answers in one session, reusing what it holds, and prints them as they come."""

    def __init__(
        self, args: argparse.Namespace, console: Console, plan: Plan, session: Session
    ) -> None:
        self._args = args
        self._console = console
        self._plan = plan
        self._session = session
        self._held: list[int] = []

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a plain prompt; an empty one is the beginning of a text."""
        ids = self._plan.tokenizer.encode(text)
        if not ids and self._plan.bos_token_id is not None:
            return [self._plan.bos_token_id]
        if not ids:
            raise UsageError("the prompt is empty; give -p some text")
        return ids

    def chat_ids(self, messages: Messages, text: str) -> list[int]:
        """Tokens of a conversation that goes on with `text`."""
        tokenizer = self._plan.tokenizer
        prompt = tokenizer.render_chat([*messages, {"role": "user", "content": text}])
        return tokenizer.encode(prompt, add_special_tokens=False)

    def answer(self, ids: Sequence[int]) -> Answer:
        """Generate after `ids`, which are the whole text so far."""
        limit = self._plan.context_length
        if len(ids) >= limit:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, and the plan's context is {limit}; "
                "shorten it, or compile with a larger --ctx"
            )
        begin = first = last = time.perf_counter()
        kept = self._keep(ids)
        stream = self._plan.tokenizer.stream()
        tokens: list[int] = []
        pieces: list[str] = []
        for token in self._generate(ids, kept):
            last = time.perf_counter()
            if not tokens:
                first = last
            tokens.append(token)
            self._print(pieces, stream.push(token))
        self._print(pieces, stream.flush())
        if not tokens:
            first = last = time.perf_counter()
        self._held = [*ids, *tokens][: self._session.position]
        finish = "length" if len(tokens) == self._args.n else "stop"
        if finish == "stop" and len(self._held) >= limit:
            finish = "context"
        return Answer(
            text="".join(pieces),
            tokens=tokens,
            num_prompt_tokens=len(ids),
            num_new_prompt_tokens=len(ids) - kept,
            prefill_seconds=first - begin,
            decode_seconds=last - first,
            finish=finish,
        )

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
        """Prefill chunk by chunk, so that Ctrl-C and the progress bar need not wait."""
        chunk = self._plan.chunk
        while len(ids) - kept > chunk:
            self._session.prefill(ids[kept : kept + chunk], logits="none")
            kept += chunk
            self._console.progress("reading the prompt", kept, len(ids))
        self._console.clear()
        args = self._args
        return self._session.generate(
            ids[kept:],
            max_new_tokens=args.n,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
        )

    def _print(self, pieces: list[str], text: str) -> None:
        pieces.append(text)
        if not self._args.json:
            sys.stdout.write(text)
            sys.stdout.flush()


def _opening(system: str | None) -> Messages:
    return [{"role": "system", "content": system}] if system else []


def _converse(writer: Writer, system: str | None) -> None:
    """Question and answer until the end of stdin; Ctrl-C ends it too."""
    messages = _opening(system)
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        answer = writer.answer(writer.chat_ids(messages, line.strip()))
        print(flush=True)
        messages += [
            {"role": "user", "content": line.strip()},
            {"role": "assistant", "content": answer.text},
        ]
