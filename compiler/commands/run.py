"""`atsc run`: text out of a plan, as it comes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from atsc.compiler.commands import trace as traces
from atsc.compiler.commands.console import (
    MOST_THREADS,
    Console,
    at_least,
    between,
    counted,
    existing,
    format_size,
    parse_size,
)
from atsc.compiler.commands.general import refuse_general
from atsc.compiler.commands.writer import Prompt, Writer
from atsc.compiler.errors import PlanError, UsageError


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "run",
        help="generate text",
        description=__doc__,
        epilog='As: atsc run model.atsplan -p "Once upon a time", or, to converse: '
        "atsc run model.atsplan --chat --temperature 0.7",
        allow_abbrev=False,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="what to go on from; `-`: stdin")
    parser.add_argument(
        "--chat", action="store_true", help="use the chat template; without -p, converse"
    )
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="with --chat: the system message; empty, it also keeps out the model's own",
    )
    parser.add_argument(
        "-n",
        type=_num_tokens,
        metavar="N",
        help="most new tokens, -1: until the text ends or the context is full (-1 with --chat, "
        "else 256)",
    )
    parser.add_argument(
        "--temperature",
        type=between(0, 100),
        default=0.0,
        metavar="T",
        help="0: always the likeliest token (0)",
    )
    parser.add_argument(
        "--top-k",
        type=at_least(0),
        default=0,
        metavar="K",
        help="choose among the K likeliest; 0: among all (0)",
    )
    parser.add_argument(
        "--top-p",
        type=between(0, 1),
        default=1.0,
        metavar="P",
        help="among the likeliest that make up this probability (1)",
    )
    parser.add_argument(
        "--min-p",
        type=between(0, 1),
        default=0.0,
        metavar="P",
        help="among those at least this times as likely as the likeliest (0)",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        metavar="N",
        help="with a temperature: the same seed gives the same text (default: another every time)",
    )
    parser.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="of the CPU (default: one a core)",
    )
    parser.add_argument(
        "--vram",
        type=parse_size,
        metavar="SIZE",
        help="GPU memory to use, as 6G or 800M; 0: the CPU alone (default: as compiled)",
    )
    add_transfer_flags(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read all weights first, and compare their checksums"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    traces.add_flag(parser)
    return parser


def _num_tokens(text: str) -> int:
    return -1 if text == "-1" else at_least(1)(text)


def add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    """Declare `--transfer` and its numbers; `transfer_options` reads them."""
    parser.add_argument(
        "--transfer",
        choices=("load-aware", "static", "none"),
        default="load-aware",
        help="which of the CPU's weights rounds copy to the GPU: by the speeds that they show "
        "(the default), by those of compilation, or none but in long prefill rounds",
    )
    parser.add_argument(
        "--drift-threshold",
        type=between(0.01, 10),
        default=0.15,
        metavar="SHARE",
        help="choose again when speeds are off by more (0.15)",
    )
    parser.add_argument(
        "--reschedule-interval",
        type=between(1, 1e6),
        default=5.0,
        metavar="ROUNDS",
        help="but not sooner than after the time of so many rounds (5)",
    )
    parser.add_argument(
        "--yield-gpu",
        action="store_true",
        help="leave the GPU to other programs whenever it waits for the CPU",
    )


def gpu_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `atsc.load` that `--vram` stands for: without any, all is on the CPU."""
    return {"device": False} if args.vram == 0 else {"vram": args.vram}


def transfer_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `atsc.load` that these flags stand for."""
    return {
        "transfer": args.transfer,
        "drift_threshold": args.drift_threshold,
        "reschedule_interval": args.reschedule_interval,
        "yield_gpu": args.yield_gpu,
    }


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    if args.prompt is None and (not args.chat or args.json):
        hint = "--json takes one prompt" if args.chat else "or converse with --chat"
        raise UsageError(f"give a prompt with -p TEXT; {hint}")
    if args.system is not None and not args.chat:
        raise UsageError("--system belongs to --chat; without it, write all of the prompt yourself")
    directory = existing(args.plan, "plan folder", PlanError)
    refuse_general(directory, "run")
    from atsc.runtime import loader

    with (
        traces.tracing(args.trace) as trace,
        loader.load(
            directory,
            threads=args.threads,
            verify=args.verify,
            **gpu_options(args),
            **transfer_options(args),
        ) as plan,
        plan.session() as session,
    ):
        if trace:
            trace.watch(plan, session)
        if console.verbose:
            held = f", {format_size(plan.device_bytes)} of VRAM" if plan.device_bytes else ""
            threads = counted(plan.num_threads, "thread")
            console.note(f"{plan.model_name}: {threads}, {plan.isa} kernels{held}")
        writer = Writer(args, console, plan, session, trace)
        if args.prompt is None:
            from atsc.compiler.commands.chat import converse

            converse(writer, plan, console, args.system)
            return 0
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        prompt = _prompt(writer, args, text)
        try:
            answer = writer.answer(prompt)
        except KeyboardInterrupt:
            if not args.json:
                print(flush=True)  # or the shell's prompt would go on in the text's last line
            raise
    if args.json:
        console.result({"prompt": text, **answer.document()}, "")
    else:
        print(flush=True)
        console.note(answer.speed())
    return 0


def _prompt(writer: Writer, args: argparse.Namespace, text: str) -> Prompt:
    if not args.chat:
        return writer.text_prompt(text)
    opening = [{"role": "system", "content": args.system}] if args.system is not None else []
    return writer.chat_prompt([*opening, {"role": "user", "content": text}])
