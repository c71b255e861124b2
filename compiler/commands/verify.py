"""`atsc verify`: a plan's logits against onnxruntime's on the same model, token by token.

Most of the text goes through prefill, the last tokens through decode: both kinds of kernels count.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands import general
from atsc.compiler.commands.console import MOST_THREADS, Console, at_least, existing, table
from atsc.compiler.commands.other_formats import refuse_other_formats
from atsc.compiler.errors import ModelError, PlanError, UsageError
from atsc.compiler.importers.converted import converted, is_gguf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atsc.compiler.commands.compare import Bounds, Result
    from atsc.compiler.commands.reference import Reference
    from atsc.runtime.loader import Plan

PIECE_TOKENS = 128
NUM_DECODED = 16

TEXT = """\
The lighthouse at the end of the bay had been dark for eleven years when Marta bought it. Nobody in
the village could say why she wanted it. She told the baker that she liked the quiet, and she told
the postman that she was writing a book about birds, and to the children who asked she said that a
lighthouse is simply a house with a very good staircase. In the first winter the wind took three
windows and half of the roof. She learned to mend both. She bought a ladder, a saw and forty metres
of rope, and by March she could be seen from the harbour, a small figure against the white wall.

The lamp itself was a different matter. It stood in a room of glass, as tall as a person, made of
rings of prisms that bent every ray of light into one flat beam. Two of the prisms were cracked. The
clockwork that once turned the lamp had rusted, and mice had eaten the leather of the bellows. Marta
wrote letters: to the museum in the capital, to a factory that no longer existed, to an engineer who
had retired to the south. The engineer answered. He enclosed four drawings, a list of 27 parts and
one sentence of advice: "Clean everything twice before you decide that it is broken."

So she cleaned everything twice. Water boils at 100 degrees, brass shines after vinegar and salt,
and a gear with 64 teeth that meets one with 16 turns it four times for each of its own turns. These
were facts, and facts were restful. On the last evening of summer she wound the weights to the top,
lit the burner and waited. The room hummed; the rings began to move; and far out on the water, where
the fishing boats were coming home, somebody stood up in the bow and took off his hat.
"""


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "verify", help="compare a plan with onnxruntime", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="the .onnx file or folder that it was made from"
    )
    parser.add_argument(
        "--tokens", type=at_least(2), default=256, metavar="N", help="of the text to compare (256)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text (default: one of our own)"
    )
    parser.add_argument(
        "--threads",
        type=at_least(1, MOST_THREADS),
        metavar="N",
        help="of the CPU (default: one a core)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    directory = existing(args.plan, "plan folder", PlanError)
    source = existing(args.model, "model", ModelError)
    refuse_other_formats(source)
    if is_gguf(source):
        with converted(source, directory.resolve().parent, console.progress) as model:
            return _verify(directory, model, args, console)
    return _verify(directory, source, args, console)


def _verify(directory: Path, source: Path, args: argparse.Namespace, console: Console) -> int:
    from atsc.compiler import plan as manifests
    from atsc.compiler.commands.reference import Reference
    from atsc.compiler.importers.onnx import import_onnx
    from atsc.runtime import loader

    manifest = manifests.load(directory)
    if manifest.graph is not None:
        return general.verify(directory, source, args.threads, console)
    if args.tokens > manifest.options.ctx:
        raise UsageError(
            f"--tokens {args.tokens}: the plan's context is {manifest.options.ctx} tokens; "
            "choose fewer"
        )
    graph = import_onnx(source, context=manifest.options.ctx)
    if graph.info.vocab_size != manifest.model.vocab_size:
        raise ModelError(
            f"{args.model}: has a vocabulary of {graph.info.vocab_size}, and the plan one of "
            f"{manifest.model.vocab_size}; give the model that the plan was compiled from"
        )
    with loader.load(directory, threads=args.threads) as plan:
        ids, text = _ids(plan, args.tokens, args.text)
        reference = Reference(Path(graph.info.source_files[0]), graph, args.threads)
        bounds = _bounds(manifest.options.accuracy_level, reference.forced_levels)
        result = _compare(plan, reference, ids, bounds, console)
    failures = result.failures(bounds)
    document = {
        "ok": not failures,
        "failures": failures,
        "text": text,
        **dataclasses.asdict(result),
        "perplexity_ratio": result.perplexity_ratio,
        "bounds": dataclasses.asdict(bounds),
    }
    console.result(document, _report(result, bounds, text))
    if failures:
        console.note(f"atsc: {directory} is out of bounds: {', '.join(failures)}")
    return 1 if failures else 0


def _bounds(accuracy_level: int | None, levels_in_file: frozenset[int]) -> Bounds:
    from atsc.compiler.commands.compare import FLOAT_BOUNDS, INT8_BOUNDS

    levels = levels_in_file if accuracy_level is None else {accuracy_level} & {1, 4}
    return INT8_BOUNDS if levels_in_file and 4 in levels else FLOAT_BOUNDS


def _ids(plan: Plan, count: int, file: Path | None) -> tuple[NDArray[np.int64], str]:
    """The tokens to compare on, and where they are from; a plan without tokenizer takes noise."""
    import numpy as np

    if not (plan.directory / "tokenizer" / "tokenizer.json").is_file():
        if file:
            raise UsageError(f"--text {file}: the plan has no tokenizer; leave it out")
        noise = np.random.default_rng(0).integers(0, plan.vocab_size, count)
        return noise, "random tokens"
    text = existing(file, "text", UsageError).read_text("utf-8") if file else TEXT
    ids = np.array(plan.tokenizer.encode(text), np.int64)
    if file and len(ids) < count:
        raise UsageError(f"--text {file}: has {len(ids)} tokens; give --tokens {len(ids)} or fewer")
    return np.resize(ids, count), str(file) if file else "text of our own"


def _compare(
    plan: Plan, reference: Reference, ids: NDArray[np.int64], bounds: Bounds, console: Console
) -> Result:
    from atsc.compiler.commands.compare import Comparison

    comparison = Comparison(bounds)
    prefilled = max(1, len(ids) - NUM_DECODED)
    cuts = [*range(0, prefilled, PIECE_TOKENS), *range(prefilled, len(ids))]
    with plan.session() as session:
        for begin, end in zip(cuts, [*cuts[1:], len(ids)], strict=True):
            piece = ids[begin:end]
            if begin < prefilled:
                ours = session.prefill(piece, logits="all")
            else:
                ours = session.decode(int(piece[0]))[None]
            comparison.add(reference.forward(piece), ours, ids[begin + 1 : end + 1])
            console.progress("comparing", end, len(ids))
    return comparison.result()


def _report(result: Result, bounds: Bounds, text: str) -> str:
    clear, allowed = result.num_clear, result.perplexity_allowance
    rows = [
        [f"{result.num_tokens} tokens, {text}", "found", "allowed"],
        ["relative L2 error", f"{result.relative_l2:.2e}", f"{bounds.relative_l2:.2e}"],
        ["largest difference of a logit", f"{result.max_difference:.4f}", ""],
        ["mean difference of a logit", f"{result.mean_difference:.5f}", ""],
        ["same top token", f"{result.top1_agreement:.2%}", f"{result.top1_bound(bounds):.2%}"],
        [
            f"  of {clear} ahead by > {result.stated_error:.3f}: different",
            str(result.num_clear_wrong),
            "0",
        ],
        ["perplexity, onnxruntime", f"{result.reference_perplexity:.4f}", ""],
        ["perplexity, plan", f"{result.perplexity:.4f}", ""],
        [
            f"ratio, +- {result.ratio_error:.5f} by the text's length",
            f"{result.perplexity_ratio:.5f}",
            f"{1 - allowed:.3g} to {1 + allowed:.3g}",
        ],
    ]
    report = table(rows, right=(1, 2))
    if result.guesses:
        report += (
            f"\nthe model predicts these tokens worse than equal odds for all {result.vocabulary}: "
            "perplexity and top tokens are judged by their scatter; a text that it knows says more"
        )
    return report
