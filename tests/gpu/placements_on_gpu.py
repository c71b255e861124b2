"""Any placement of a model on a real GPU gives the tokens of the CPU alone.

    python tests/gpu/placements_on_gpu.py --model DIR [--placements 20] [--vram 40G]
    python tests/gpu/placements_on_gpu.py --make qwen3-0.6b --layers 6
    python tests/gpu/placements_on_gpu.py --model DIR --ids ids.json --ctx 1024 --accuracy-level 1

Compiles the model for this machine's GPU, then compares logits, teacher-forced: a prompt in one
prefill (streaming or not), decode steps, and a round of a few rows, on the CPU alone, as planned,
on the GPU alone, split by layers in three ways, and split at random. The top token must be the same
wherever the CPU's margin between first and second exceeds six times the stated error. Of texts
(--ids: one or several, each read from position 0), perplexities over all tokens must agree within
0.3 %; where activations are int8 (accuracy level 4, what files ask for), within that and twice the
standard error, since any other order of sums makes such differences. That error is 0.4 % for 256
tokens: some thousand are needed to say more. Needs no pytest, so that it runs on a bare machine;
without a GPU, `--target virtual --vram 900M` shows that the splits run, with the CPU's kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STATED_ERRORS = {1: 2e-3, 4: 4e-2}
"""By accuracy level: relative L2 error of logits, as `atsc verify` allows it."""
PERPLEXITY_CHANGE = 0.003
PROMPT, STEPS, LAST = 90, 10, 3
BLOCK_ROWS = 16
"""Rows of logits that a thread works on at a time, in float64."""
ROOT = Path(__file__).resolve().parents[2]


def logits_of(plan: Any, ids: list[int]) -> np.ndarray:
    """Rows of logits: of a prefill, of decode steps, and of a round of three rows."""
    prompt = len(ids) - STEPS - LAST
    with plan.session() as session:
        rows = [session.prefill(ids[:prompt], logits="all")]
        rows += [session.decode(token)[None] for token in ids[prompt : prompt + STEPS]]
        rows.append(session.prefill(ids[prompt + STEPS :], logits="all"))
    return np.concatenate(rows)


@dataclass(frozen=True)
class Expected:
    """The CPU's logits of a text, float32 [tokens, vocabulary], and what is compared with.

    Of each token: the most likely next one, whether its margin is clear, the sum of the squared
    logits. Of each but the last: the negative log-likelihood of the token that follows.
    """

    ids: list[int]
    logits: np.ndarray
    top: np.ndarray
    clear: np.ndarray
    squares: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class Difference:
    """Of each token of a text how far a placement is from the CPU; of `losses`, but the last."""

    squares: np.ndarray
    finite: np.ndarray
    clear: np.ndarray
    same: np.ndarray
    losses: np.ndarray


def by_rows(work: Callable[..., Sequence[np.ndarray]], *logits: np.ndarray) -> list[np.ndarray]:
    """Arrays that `work` gives for a few rows at a time, each joined: float64 takes memory."""

    def of_block(begin: int) -> Sequence[np.ndarray]:
        return work(*(each[begin : begin + BLOCK_ROWS].astype(np.float64) for each in logits))

    with ThreadPoolExecutor(8) as pool:
        blocks = list(pool.map(of_block, range(0, len(logits[0]), BLOCK_ROWS)))
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def log_sums(rows: np.ndarray) -> np.ndarray:
    """Logarithm of each row's sum of exponentials."""
    most = rows.max(axis=-1)
    return np.asarray(most + np.log(np.exp(rows - most[:, None]).sum(axis=-1)))


def losses(logits: np.ndarray, sums: np.ndarray, ids: list[int]) -> np.ndarray:
    """Negative log-likelihood of each next token."""
    return np.asarray(sums[:-1] - logits[np.arange(len(ids) - 1), ids[1:]])


def expected_of(logits: np.ndarray, ids: list[int], stated_error: float) -> Expected:
    """What is compared with: the CPU's logits."""

    def work(rows: np.ndarray) -> list[np.ndarray]:
        second, first = np.partition(rows, (-2, -1), axis=-1)[:, -2:].T
        clear = first - second > 6 * stated_error * rows.std(axis=-1)
        return [rows.argmax(-1), clear, np.square(rows).sum(-1), log_sums(rows)]

    top, clear, squares, sums = by_rows(work, logits)
    return Expected(ids, logits, top, clear, squares, losses(logits, sums, ids))


def compare(logits: np.ndarray, expected: Expected) -> Difference:
    """How far a placement's logits of a text are from the CPU's."""

    def work(rows: np.ndarray, others: np.ndarray) -> list[np.ndarray]:
        squares = np.square(rows - others).sum(-1)
        return [rows.argmax(-1), np.isfinite(squares), squares, log_sums(rows)]

    top, finite, squares, sums = by_rows(work, logits, expected.logits)
    change = losses(logits, sums, expected.ids) - expected.losses
    return Difference(squares, finite, expected.clear, top == expected.top, change)


def summary(differences: list[Difference], expected: list[Expected]) -> dict[str, Any]:
    """A placement's figures over all tokens of all texts."""
    squares = sum(float(text.squares.sum()) for text in expected)
    change = np.concatenate([each.losses for each in differences])
    ratio = float(np.exp(change.mean()))
    return {
        "tokens": sum(len(text.ids) for text in expected),
        "relative_l2": (sum(float(each.squares.sum()) for each in differences) / squares) ** 0.5,
        "finite": all(bool(each.finite.all()) for each in differences),
        "clear_tokens": sum(int(each.clear.sum()) for each in differences),
        "clear_tokens_wrong": sum(int((each.clear & ~each.same).sum()) for each in differences),
        "perplexity_ratio": ratio,
        "standard_error": float(change.std() / len(change) ** 0.5),
        "within_change": abs(ratio - 1) <= PERPLEXITY_CHANGE,
    }


def fixed_placements(manifest: Any) -> list[tuple[str, list[bool] | None]]:
    """Name, and for each unit whether it is on the GPU; None: as the plan has it.

    Of the splits by layers, the head is beside the last layer, and the embedding on the CPU.
    """
    layers = [unit.cost.layer if unit.cost else None for unit in manifest.units]
    count = 1 + max(layer for layer in layers if layer is not None)

    def split(chosen: range) -> list[bool]:
        return [
            layer in chosen or (unit.cost is not None and unit.cost.part == "head" and last)
            for unit, layer in zip(manifest.units, layers, strict=True)
            for last in [count - 1 in chosen]
        ]

    return [
        ("planned", None),
        ("all on the GPU", [True] * len(layers)),
        ("none on the GPU", [False] * len(layers)),
        ("first half of the layers", split(range(count // 2))),
        ("second half of the layers", split(range(count // 2, count))),
        ("every second layer", split(range(1, count, 2))),
    ]


def check(
    plan_path: Path, placements: int, threads: int, texts: list[list[int]] | None, level: int
) -> list[dict[str, Any]]:
    """Compare all placements with the CPU alone; without texts, of tokens drawn at random."""
    from atsc.runtime import loader

    rng = np.random.default_rng(0)
    with loader.load(plan_path, threads=threads, device=False) as plan:
        if texts is None:
            texts = [rng.integers(0, plan.vocab_size, PROMPT + STEPS + LAST).tolist()]
        expected = [expected_of(logits_of(plan, ids), ids, STATED_ERRORS[level]) for ids in texts]
        num_units = plan.num_units
        cases = fixed_placements(plan.manifest)
    cases += [
        (f"random {index}", (rng.random(num_units) < rng.random()).tolist())
        for index in range(placements)
    ]
    results = []
    for name, bits in cases:
        begin = time.perf_counter()
        try:
            with loader.load(plan_path, threads=threads, on_device=bits) as plan:
                found = summary(
                    [compare(logits_of(plan, text.ids), text) for text in expected], expected
                )
                found["device_bytes"] = plan.device_bytes
                found["predicted_device_bytes"] = plan.predicted_device_bytes
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        results.append({"placement": name, **found, "seconds": time.perf_counter() - begin})
        print(json.dumps(results[-1]), flush=True)
    return results


def is_right(result: dict[str, Any], is_text: bool, level: int) -> bool:
    """Whether a placement's logits are as good as the CPU's."""
    if "error" in result or result["clear_tokens_wrong"] or not result["finite"]:
        return False
    allowed = PERPLEXITY_CHANGE + (2 * result["standard_error"] if level == 4 else 0)
    return not is_text or abs(result["perplexity_ratio"] - 1) <= allowed


def shown(result: dict[str, Any]) -> str:
    """A placement's line of the table at the end."""
    if "error" in result:
        return f"{result['placement']:26} {result['error']}"
    ratio, error = result["perplexity_ratio"], result["standard_error"]
    return (
        f"{result['placement']:26} perplexity {ratio:.5f} +- {error:.5f} of the CPU's, "
        f"relative L2 {result['relative_l2']:.2e}, {result['clear_tokens_wrong']} of "
        f"{result['clear_tokens']} clear tokens wrong"
    )


def spread(results: list[dict[str, Any]]) -> str:
    """The line that says how perplexities of the placements lie about the CPU's."""
    ratios = {
        result["placement"]: result["perplexity_ratio"]
        for result in results
        if "error" not in result and np.isfinite(result["perplexity_ratio"])
    }
    if not ratios:
        return "perplexity: no placement ran"
    furthest = max(ratios, key=lambda name: abs(ratios[name] - 1))
    within = sum(result.get("within_change", False) for result in results)
    return (
        f"perplexity by the CPU's: {np.mean(list(ratios.values())):.5f} on average, furthest "
        f"{ratios[furthest]:.5f} ({furthest}); {within} of {len(results)} placements within "
        f"{PERPLEXITY_CHANGE:.1%}"
    )


def read_texts(path: Path, context: int) -> list[list[int]]:
    """The texts of a file: a JSON list of token ids, or a list of such lists."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--ids {path}: {error}") from None
    texts = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for index, text in enumerate(texts):
        name = f"--ids {path}: text {index}"
        if not isinstance(text, list) or not all(type(token) is int for token in text):
            raise SystemExit(f"{name} is not a list of token ids, whole numbers")
        if len(text) <= STEPS + LAST:
            raise SystemExit(f"{name} has {len(text)} tokens; give at least {STEPS + LAST + 1}")
        if len(text) > context:
            raise SystemExit(f"{name} has {len(text)} tokens; give at least --ctx {len(text)}")
    return texts


def main() -> int:
    """Run it; exit code 1 if a placement is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--make", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--placements", type=int, default=20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--vram", default="20G")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--accuracy-level", type=int, choices=(1, 4), default=4)
    parser.add_argument(
        "--ids", type=Path, help="a JSON list of token ids, or a list of such lists"
    )
    args = parser.parse_args()
    texts = read_texts(args.ids, args.ctx) if args.ids else None
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            maker = [sys.executable, ROOT / "benchmarks/make_model.py", args.make, "--onnx"]
            subprocess.run(
                [*maker, "--layers", str(args.layers), "--out", model], check=True, cwd=ROOT
            )
        plan = Path(folder) / "model.atsplan"
        compiler = [sys.executable, "-m", "atsc.compiler.cli", "compile", model, "-o", plan]
        options = ["--vram", args.vram, "--ctx", str(args.ctx), "--chunk", "128", "-v"]
        level = args.accuracy_level
        options += ["--accuracy-level", str(level)]
        subprocess.run([*compiler, *options, "--target", args.target], check=True)
        results = check(plan, args.placements, args.threads, texts, level)
    wrong = [result for result in results if not is_right(result, texts is not None, level)]
    print("\n".join(map(shown, results)))
    if texts is not None:
        print(spread(results))
    for result in wrong:
        print(f"wrong: {result['placement']}")
    print(f"{len(results)} placements at accuracy level {level}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
