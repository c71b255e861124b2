"""The chat of `atsc run --chat`: turns, commands and Ctrl-C, on a terminal or from a script.

Every turn renders the whole conversation by the model's template; the writer then prefills only
what differs from what the session holds. On a terminal Ctrl-C ends the answer, and the program only
where there is none. A script is one turn a line; its answers alone go to stdout.
"""

from __future__ import annotations

import contextlib
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from atsc.compiler.commands.console import Console, format_size
from atsc.compiler.commands.writer import Answer, Message, Prompt, Writer
from atsc.compiler.errors import UsageError

if TYPE_CHECKING:
    from atsc.runtime.loader import Plan

PROMPT, MORE = "> ", ". "
PASTE_SECONDS = 0.05
"""Lines that come closer together than this were pasted, and are one turn."""
HELP = """\
/help            this
/reset           forget the conversation
/stats           speeds, tokens in the context, memory
/exit            leave, as Ctrl-D does
A line that ends with \\ goes on in the next, and pasted lines stay together. Ctrl-C ends an answer.
Begin with // what shall begin with /."""


def converse(writer: Writer, plan: Plan, console: Console, system: str | None) -> None:
    """Question and answer until the end of stdin, /exit, or Ctrl-C twice at the prompt.

    Raises:
        UsageError: the model has no chat template, or it refuses the system message; in a script
            also a turn that cannot be answered.
    """
    chat = Chat(writer, plan, console, system)
    if not sys.stdin.isatty():
        for turn in _turns(lambda prompt: sys.stdin.readline(), pasted=False):
            if not chat.take(turn):
                return
        return
    console.note(
        f"{plan.model_name}, context {plan.context_length} tokens; /help lists the commands, "
        "Ctrl-D leaves"
    )
    with _Interrupts(writer) as interrupts:
        for turn in _turns(lambda prompt: interrupts.read(prompt, console), pasted=True):
            with interrupts.of_answer():
                try:
                    if not chat.take(turn):
                        return
                except UsageError as error:
                    console.note(str(error))


class Chat:
    """A conversation and what it cost so far."""

    def __init__(self, writer: Writer, plan: Plan, console: Console, system: str | None) -> None:
        self._writer = writer
        self._plan = plan
        self._console = console
        self._opening: list[Message] = [_message("system", system)] if system is not None else []
        self._exchanges: list[tuple[Message, Message]] = []
        self._num_tokens = 0
        self._stats = Stats()
        writer.chat_prompt([*self._opening, _message("user", "Hello")])  # refused now or never

    def take(self, turn: str) -> bool:
        """Obey a command or answer a question; False to leave."""
        if turn.startswith("//"):
            self._answer(turn[1:])
        elif turn.startswith("/"):
            return self._obey(turn)
        else:
            self._answer(turn)
        return True

    def _obey(self, command: str) -> bool:
        if command in ("/exit", "/quit"):
            return False
        if command == "/help":
            self._console.note(HELP)
        elif command == "/reset":
            # The session keeps its tokens: the next conversation may begin with the same ones.
            self._exchanges.clear()
            self._num_tokens = 0
            self._console.note("the conversation is forgotten")
        elif command == "/stats":
            self._console.note(self._stats.text(self._num_tokens, self._plan.context_length))
        else:
            word = command.split()[0]
            self._console.note(
                f"no command {word}; /help lists them, and // begins a text that starts with /"
            )
        return True

    def _answer(self, question: str) -> None:
        asked = _message("user", question)
        answer = self._writer.answer(self._fitting_prompt(asked))
        self._stats.add(answer)
        self._num_tokens = self._writer.num_held
        if answer.text:
            print(flush=True)
        if answer.text or answer.finish != "interrupted":
            self._exchanges.append((asked, _message("assistant", answer.text)))
        if answer.finish == "interrupted":
            self._console.note("(interrupted)" if answer.text else "(interrupted, not asked)")
        elif answer.finish == "context":
            self._console.note(
                f"(the context of {self._plan.context_length} tokens is full; the next question "
                "makes room by forgetting the oldest; /reset forgets all)"
            )
        elif answer.finish == "length":
            self._console.note("(cut short by -n; ask to go on)")

    def _fitting_prompt(self, asked: Message) -> Prompt:
        """The conversation; the oldest exchanges go where no room is left for an answer.

        Then half of the context is made free, so that not every turn has to read all of it again.
        """
        context, before = self._plan.context_length, len(self._exchanges)
        prompt = self._prompt(asked)
        if len(prompt.ids) > context - context // 8:
            while len(prompt.ids) > context // 2 and self._exchanges:
                del self._exchanges[0]
                prompt = self._prompt(asked)
        if forgotten := before - len(self._exchanges):
            self._console.note(f"(the context is full: forgot the oldest {forgotten} of {before})")
        return prompt

    def _prompt(self, asked: Message) -> Prompt:
        told = [message for exchange in self._exchanges for message in exchange]
        return self._writer.chat_prompt([*self._opening, *told, asked])


class Stats:
    """Sums over the answers of a conversation, and the latest of them."""

    def __init__(self) -> None:
        self.latest: Answer | None = None
        self.num_prompt_tokens = 0
        self.num_prefilled = 0
        self.num_answered = 0

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        self.latest = answer
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_prefilled += answer.num_new_prompt_tokens
        self.num_answered += len(answer.tokens)

    def text(self, num_tokens: int, context: int) -> str:
        """For people."""
        lines = [
            f"context   {num_tokens} of {context} tokens",
            f"prefilled {self.num_prefilled} tokens of {self.num_prompt_tokens}; the session held "
            "the others already",
            f"answered  {self.num_answered} tokens",
        ]
        if self.latest:
            lines.append(f"latest    {self.latest.speed()}")
        memory = process_memory()
        if memory:
            resident, private = memory
            lines.append(
                f"memory    {format_size(resident)} resident, {format_size(private)} of it private"
            )
        return "\n".join(lines)


def process_memory(status: Path = Path("/proc/self/status")) -> tuple[int, int] | None:
    """Bytes of this process in RAM: all, and without mapped files; None where it is not told."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in status.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                fields[name] = int(value.split()[0]) << 10
    return (fields["VmRSS"], fields["RssAnon"]) if len(fields) == 2 else None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns(read: Callable[[str], str], *, pasted: bool) -> Iterator[str]:
    """Turns that are not empty; `read` takes a prompt, and gives a line, or "" at the end."""
    while line := read(PROMPT):
        lines = [line.rstrip("\n")]
        while lines[-1].endswith("\\") or (pasted and _is_waiting()):
            more = read(MORE if lines[-1].endswith("\\") else "")
            lines[-1] = lines[-1].removesuffix("\\")
            if not more:
                break
            lines.append(more.rstrip("\n"))
        if turn := "\n".join(lines).strip():
            yield turn


def _is_waiting() -> bool:
    """Whether more of stdin is there already."""
    return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])


class _AtPromptError(Exception):
    """Ctrl-C where there is no answer to end."""


class _Interrupts:
    """What Ctrl-C means at this moment; a context manager for the length of a conversation."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._answering = self._stopping = self._reading = self._missed = False

    def __enter__(self) -> _Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._reading:
            raise _AtPromptError
        if not self._answering:
            self._missed = True
            return
        if self._stopping:
            raise KeyboardInterrupt
        self._stopping = True
        self._writer.stop()

    @contextlib.contextmanager
    def of_answer(self) -> Iterator[None]:
        """Ctrl-C ends the answer; if that takes too long, a second one the program."""
        self._answering, self._stopping = True, False
        try:
            yield
        finally:
            self._answering = False

    def read(self, prompt: str, console: Console) -> str:
        """A line with its end, or "" at the end of stdin or at the second Ctrl-C in a row."""
        for attempt in (1, 2):
            try:
                self._reading = True
                if self._missed:
                    raise _AtPromptError
                line = _read_line(prompt)
                self._reading = False
                return line
            except _AtPromptError:
                self._reading = self._missed = False
                console.note("" if attempt == 2 else "\n(Ctrl-C again leaves, as /exit does)")
        return ""


def _read_line(prompt: str) -> str:
    """From the terminal, with its line editing where Python has it."""
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
        return sys.stdin.readline()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input uses it once it is there)
    try:
        return input(prompt) + "\n"
    except EOFError:
        print(flush=True)
        return ""
