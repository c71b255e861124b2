"""Makes models for benchmarks, without a network.

    make_model.py qwen3-0.6b                random int4 weights in the shape of a published model
    make_model.py tiny-qwen3-0.6b           a model of that kind in a few megabytes
    make_model.py smollm2-135m --from model.gguf     a real GGUF's weights, rounded to Q4_0

Writes DIR/model.onnx (conventions of the GenAI builder, symmetric int4) and DIR/model-q4_0.gguf
with the same weights, bit for bit. The ONNX file alone (--onnx) needs no package `gguf`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from model_shapes import SHAPES, Shape, shape_of
from random_model import random_decoder

from atsc.compiler.errors import AtscError, UsageError
from atsc.compiler.importers.file_set import new_file_set
from atsc.compiler.importers.onnx.decoder import Decoder
from atsc.compiler.importers.onnx.genai_config import genai_config
from atsc.compiler.importers.onnx.write_decoder import write_decoder

ONNX_NAME = "model.onnx"
GGUF_NAME = "model-q4_0.gguf"


def main(arguments: list[str] | None = None) -> int:
    """Make what the command line asks for; exit code 0, 1 (failed) or 2 (usage)."""
    args = _parser().parse_args(arguments)
    folder = args.out or Path("models") / args.name
    both = not (args.onnx or args.gguf)
    try:
        if args.source is not None:
            make_from_gguf(args.source, folder, onnx=args.onnx or both)
        else:
            make_random(
                args.name,
                folder,
                layers=args.layers,
                context=args.ctx,
                seed=args.seed,
                block_size=args.block_size,
                onnx=args.onnx or both,
                gguf=args.gguf or (both and _has_gguf(args.name, args.block_size)),
            )
    except UsageError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    except AtscError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 1
    return 0


def make_random(
    name: str,
    folder: Path,
    *,
    layers: int | None = None,
    context: int = 4096,
    seed: int = 0,
    block_size: int = 32,
    onnx: bool = True,
    gguf: bool = True,
) -> None:
    """Random weights in a shape.

    Raises:
        UsageError: the shape cannot have these blocks, or has no GGUF architecture.
    """
    shape = shape_of(name)
    if shape.max_context:
        context = min(context, shape.max_context)
    _check(name, shape, block_size, gguf)
    decoder = random_decoder(shape, layers or shape.layers, context, seed, block_size)
    if onnx:
        begin = time.monotonic()
        _write_onnx(decoder, shape, folder)
        _report(folder / f"{ONNX_NAME}.data", begin)
    if gguf:
        from write_gguf import write_gguf

        begin = time.monotonic()
        with new_file_set(folder, GGUF_NAME) as files:
            write_gguf(decoder, shape, name, files.path(GGUF_NAME))
        _report(folder / GGUF_NAME, begin)


def make_from_gguf(source: Path, folder: Path, *, onnx: bool = True) -> None:
    """A real model, every matrix rounded to Q4_0; the ONNX file is converted from that GGUF."""
    from requantise import requantise_gguf

    from atsc.compiler.importers.gguf import convert_gguf

    begin = time.monotonic()
    with new_file_set(folder, GGUF_NAME) as files:
        requantise_gguf(source, files.path(GGUF_NAME))
    _report(folder / GGUF_NAME, begin)
    if onnx:
        begin = time.monotonic()
        convert_gguf(folder / GGUF_NAME, folder / ONNX_NAME)
        _report(folder / f"{ONNX_NAME}.data", begin)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*SHAPES, *(f"tiny-{name}" for name in SHAPES)]
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: models/NAME")
    parser.add_argument("--layers", type=_positive, metavar="N", help="fewer layers")
    parser.add_argument("--onnx", action="store_true", help="ONNX only")
    parser.add_argument("--gguf", action="store_true", help="GGUF only")
    parser.add_argument("--block-size", type=int, default=32, choices=(16, 32, 64, 128, 256))
    parser.add_argument("--ctx", type=_positive, default=4096, metavar="N", help="context length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="GGUF", help="round these weights instead"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _has_gguf(name: str, block_size: int) -> bool:
    return block_size == 32 and shape_of(name).architecture != "opt"


def _check(name: str, shape: Shape, block_size: int, gguf: bool) -> None:
    for width in (shape.hidden, shape.inner, shape.heads * shape.head_size):
        if width % block_size:
            raise UsageError(
                f"{name} has linear layers of {width} inputs, which are no whole blocks of"
                f" {block_size}; choose another --block-size"
            )
    if gguf and shape.architecture == "opt":
        raise UsageError(f"{name}: GGUF has no architecture for OPT; use --onnx")
    if gguf and block_size != 32:
        raise UsageError(f"GGUF's Q4_0 has blocks of 32, not {block_size}; use --onnx")


def _write_onnx(decoder: Decoder, shape: Shape, folder: Path) -> None:
    last = decoder.vocab_size - 1
    config = genai_config(
        decoder,
        ONNX_NAME,
        bos_token_id=1,
        eos_token_ids=[last],
        pad_token_id=last,
        model_type="gptoss" if shape.architecture == "gpt-oss" else "llama",
    )
    data_name = f"{ONNX_NAME}.data"
    with new_file_set(folder, ONNX_NAME) as files:
        files.write_text("genai_config.json", json.dumps(config, indent=2) + "\n")
        write_decoder(decoder, files.path(ONNX_NAME), files.path(data_name), data_name=data_name)


def _report(path: Path, begin: float) -> None:
    seconds = time.monotonic() - begin
    print(f"{path}: {path.stat().st_size / 1e9:.3f} GB in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
