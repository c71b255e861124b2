"""The command `atsc`: parses the command line, and turns every error into a line and a code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from atsc.compiler.commands import (
    bench,
    check,
    compile,
    completion,
    convert,
    doctor,
    inspect,
    profile,
    run,
    simulate,
    targets,
    verify,
)
from atsc.compiler.commands.console import Console
from atsc.compiler.errors import AtscError, UnsupportedError, UsageError
from atsc.compiler.version import atsc_version

COMMANDS = (
    compile,
    run,
    bench,
    inspect,
    profile,
    simulate,
    verify,
    check,
    convert,
    targets,
    doctor,
    completion,
)
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_EXTRAS = {
    "onnx": "compiler",
    "onnx_ir": "compiler",
    "onnxscript": "compiler",
    "gguf": "compiler",
    "jinja2": "compiler",  # and what runs text says itself that it lacks one of these two
    "tokenizers": "compiler",
    "onnxruntime": "verify",
}


class Parser(argparse.ArgumentParser):
    """Errors take one line and say where help is."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    # argparse would leave what a command does not know to the parser of all commands, which knows
    # neither its flags nor its help.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is left over, with the flag that was probably meant."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._meant(rest[0])}")
        return found, rest

    def _meant(self, argument: str) -> str:
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not argument.startswith("-"):
            return "; a prompt is given with -p" if "--prompt" in flags else ""
        near = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="atsc",
        description="Compile large language models to execution plans, and run them.",
        epilog="`atsc COMMAND --help` says what a command takes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-V",
        "--version",
        action="version",
        version=f"atsc {atsc_version()}",
        help="print the version",
    )
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for module in COMMANDS:
        command = module.add(parsers)
        command.set_defaults(run=module.run)
        command.add_argument(
            "-v", "--verbose", action="store_true", help="say what is going on, on stderr"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    try:
        if not arguments:
            build_parser().print_help(sys.stderr)
            return USAGE
        _suggest_command(arguments)
        args = build_parser().parse_args(arguments)
    except SystemExit as exit_:
        return int(exit_.code or 0)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    console = Console(json=getattr(args, "json", False), verbose=args.verbose)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = args.run(args, console)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        console.clear()
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is to be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        console.clear()
        message = _explain(error, args.verbose)
        if console.json:
            nodes = {"unsupported": error.nodes} if isinstance(error, UnsupportedError) else {}
            with contextlib.suppress(OSError):  # stdout may be what failed
                console.result({"ok": False, "error": message, **nodes}, "")
        return USAGE if isinstance(error, UsageError) else FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _mend_streams() -> None:
    """A service may have closed them, and an encoding may lack what models and paths hold."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (for life)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _suggest_command(arguments: Sequence[str]) -> None:
    names = [module.__name__.rpartition(".")[2] for module in COMMANDS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        near = difflib.get_close_matches(arguments[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(names)}"
        sys.stderr.write(f"atsc: no command {arguments[0]!r}; {hint}\n")
        raise SystemExit(USAGE)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning is one line for a person, not a place in our source."""
    sys.stderr.write(f"atsc: {message}\n")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Being asked to stop is an interrupt: everything half-written is removed on the way out."""
    raise KeyboardInterrupt


def _cache_hint(path: object) -> str:
    """Nobody named the cache folder, so where it fails, it is named."""
    from atsc.codegen.toolchain import cache_dir

    cache = cache_dir()
    if not isinstance(path, str) or not path:
        return ""
    if not Path(path).is_relative_to(cache) and not cache.is_relative_to(path):
        return ""
    return (
        f"; what is compiled is kept in {cache}: set ATSC_CACHE_DIR to a folder that can be written"
    )


def _explain(error: Exception, verbose: bool) -> str:
    """Write what went wrong to stderr, and return it."""
    if verbose:
        traceback.print_exception(error)
    if isinstance(error, AtscError):
        message = str(error)
    elif isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        extra = _EXTRAS[error.name]
        message = f"the package {error.name} is missing; pip install 'atsc[{extra}]'"
    elif isinstance(error, MemoryError):
        message = "out of memory; close other programs, or choose a smaller --ctx or --chunk"
    elif isinstance(error, UnicodeDecodeError):
        message = f"a text that is not UTF-8 ({error.reason}); convert it first, as iconv does"
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}{_cache_hint(error.filename)}"
    else:
        hint = "" if verbose else "; run again with -v for the traceback"
        message = f"internal error, please report it: {type(error).__name__}: {error}{hint}"
    lines = [part.strip() for part in message.splitlines() if part.strip()]
    # A node a line may be a long list; anything else is one line.
    text = "\n  ".join(lines) if isinstance(error, UnsupportedError) else "; ".join(lines)
    sys.stderr.write(f"atsc: {text}\n")
    return text


if __name__ == "__main__":
    sys.exit(main())
