"""`atsc completion`: a script that completes commands, flags and paths in a shell.

bash   atsc completion bash > ~/.local/share/bash-completion/completions/atsc
zsh    atsc completion zsh > a-folder-of-your-fpath/_atsc
fish   atsc completion fish > ~/.config/fish/completions/atsc.fish
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atsc.compiler.commands.console import Console

_FOLDERS = ("PLAN", "DIR")
"""Metavars whose paths are folders."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A flag or, without names, a positional argument."""

    names: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...]
    kind: str
    """What follows it: `nothing`, `choice`, `folder`, `file`; `value`: nobody can guess it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the parser."""

    name: str
    help: str
    flags: tuple[Argument, ...]
    positionals: tuple[Argument, ...]


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "completion",
        help="print a script for the shell",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(parsers=parsers)
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    console.result(None, _SCRIPTS[args.shell](commands_of(args.parsers)).rstrip("\n"))
    return 0


def commands_of(parsers: Any) -> list[Command]:
    """All commands of argparse's subparsers."""
    helps = {action.dest: action.help or "" for action in parsers._choices_actions}
    found = []
    for name, parser in parsers.choices.items():
        shown = [_argument(a) for a in parser._actions if a.help != argparse.SUPPRESS]
        found.append(
            Command(
                name=name,
                help=helps.get(name, ""),
                flags=tuple(argument for argument in shown if argument.names),
                positionals=tuple(argument for argument in shown if not argument.names),
            )
        )
    return found


def _argument(action: argparse.Action) -> Argument:
    metavar = str(action.metavar or action.dest.upper())
    choices = tuple(map(str, action.choices or ()))
    kind = "value"
    if action.nargs == 0:
        kind = "nothing"
    elif choices:
        kind = "choice"
    elif metavar in _FOLDERS:
        kind = "folder"
    elif action.type is Path or "FILE" in metavar:
        kind = "file"
    text = (action.help or "").replace("%%", "%")
    return Argument(tuple(action.option_strings), metavar, text, choices, kind)


def bash(commands: Sequence[Command]) -> str:
    """The script for bash 4.4 and later."""
    lines = [
        "_atsc() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} words=",
        "  COMPREPLY=()",
        "  if ((COMP_CWORD == 1)); then",
        f"    words={shlex.quote(' '.join([*(c.name for c in commands), '--help', '--version']))}",
        "  else",
        '    case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
        *_bash_values(commands),
        "    esac",
        "  fi",
        "  if [[ -z $words && $current == -* ]]; then",
        "    case ${COMP_WORDS[1]} in",
        *(
            f"      {c.name}) words={shlex.quote(' '.join(n for f in c.flags for n in f.names))} ;;"
            for c in commands
        ),
        "    esac",
        "  fi",
        "  if [[ -n $words ]]; then",
        '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
        "    compopt +o default 2>/dev/null",
        "    return",
        "  fi",
        "  case ${COMP_WORDS[1]} in",
        *_bash_positionals(commands),
        "  esac",
        "}",
        "complete -o default -F _atsc atsc",
    ]
    return "\n".join(lines) + "\n"


_NO_GUESS = "compopt +o default 2>/dev/null; return"
_DIRECTORIES = "compopt +o default -o dirnames 2>/dev/null; return"


def _bash_values(commands: Sequence[Command]) -> Iterator[str]:
    """What may follow each flag."""
    for command in commands:
        for flag in command.flags:
            pattern = "|".join(f'"{command.name} {name}"' for name in flag.names)
            action = {
                "choice": f"words={shlex.quote(' '.join(flag.choices))}",
                "folder": _DIRECTORIES,
                "file": "return",
                "value": _NO_GUESS,
            }.get(flag.kind)
            if action:
                yield f"      {pattern}) {action} ;;"


def _bash_positionals(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        first = command.positionals[0] if command.positionals else None
        if first is None:
            yield f"    {command.name}) {_NO_GUESS} ;;"
        elif first.kind == "choice":
            words = f"compgen -W {shlex.quote(' '.join(first.choices))}"
            yield f'    {command.name}) mapfile -t COMPREPLY < <({words} -- "$current") ;;'
        elif first.kind == "folder" and len(command.positionals) == 1:
            yield f"    {command.name}) {_DIRECTORIES} ;;"


def zsh(commands: Sequence[Command]) -> str:
    """The script for zsh, to be a file of fpath or to be sourced."""
    listed = [f"    {_zsh_quote(f'{c.name}:{c.help}')}" for c in commands]
    cases = []
    for command in commands:
        specs = [_zsh_flag(flag) for flag in command.flags]
        specs += [
            _zsh_quote(f"{index}:{p.metavar}:{_zsh_action(p)}")
            for index, p in enumerate(command.positionals, 1)
        ]
        cases.append(f"    {command.name}) _arguments -s {' '.join(specs)} ;;")
    lines = [
        "#compdef atsc",
        "_atsc() {",
        "  local -a commands=(",
        *listed,
        "  )",
        "  if ((CURRENT == 2)); then",
        "    _describe command commands",
        "    _arguments '--help[show help]' '--version[show the version]'",
        "    return",
        "  fi",
        "  shift words",
        "  ((CURRENT--))",
        "  case $words[1] in",
        *cases,
        "  esac",
        "}",
        'if [[ $funcstack[1] == _atsc ]]; then _atsc "$@"; else compdef _atsc atsc; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh_flag(flag: Argument) -> str:
    text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in flag.help)
    value = "" if flag.kind == "nothing" else f":{flag.metavar}:{_zsh_action(flag)}"
    excluded = f"({' '.join(flag.names)})" if len(flag.names) > 1 else ""
    return " ".join(_zsh_quote(f"{excluded}{name}[{text}]{value}") for name in flag.names)


def _zsh_action(argument: Argument) -> str:
    if argument.kind == "choice":
        return f"({' '.join(argument.choices)})"
    return {"folder": "_files -/", "file": "_files"}.get(argument.kind, " ")


def fish(commands: Sequence[Command]) -> str:
    """The script for fish."""
    start = "complete -c atsc"
    lines = [f"{start} -f", f"{start} -n __fish_use_subcommand -l version -d 'show the version'"]
    for command in commands:
        words = f"-a {command.name} -d {_fish_quote(command.help)}"
        lines.append(f"{start} -n __fish_use_subcommand {words}")
    for command in commands:
        seen = f"{start} -n '__fish_seen_subcommand_from {command.name}'"
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = f" -x{_fish_words(flag)}" if flag.kind != "nothing" else ""
            lines.append(f"{seen} {names}{value} -d {_fish_quote(flag.help)}")
        lines += [f"{seen}{_fish_words(p)}" for p in command.positionals if _fish_words(p)]
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_words(argument: Argument) -> str:
    words = {"folder": "(__fish_complete_directories)", "file": "(__fish_complete_path)"}
    found = " ".join(argument.choices) or words.get(argument.kind)
    return f" -a {_fish_quote(found)}" if found else ""


_SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
