"""Random placements of a model on a real GPU give the tokens of the CPU alone.

    python tests/gpu/placements_on_gpu.py --model DIR [--placements 20] [--vram 40G] [--json]
    python tests/gpu/placements_on_gpu.py --make qwen3-0.6b --layers 6

Compiles the model for this machine's GPU, then compares logits, teacher-forced: a prompt in one
prefill (streaming or not), decode steps, and a round of a few rows, on the CPU alone, on the GPU
alone, and split at random. The top token must be the same wherever the CPU's margin between first
and second exceeds six times the stated error. Needs no pytest, so that it runs on a bare machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STATED_ERROR = 4e-2
"""Relative L2 error of logits with int8 activations, as `atsc verify` allows it."""
PROMPT, STEPS = 90, 10
ROOT = Path(__file__).resolve().parents[2]


def logits_of(plan: Any, ids: list[int]) -> np.ndarray:
    """Rows of logits: of a prefill, of decode steps, and of a round of three rows."""
    with plan.session() as session:
        rows = [session.prefill(ids[:PROMPT], logits="all")]
        rows += [session.decode(token)[None] for token in ids[PROMPT : PROMPT + STEPS]]
        rows.append(session.prefill(ids[PROMPT + STEPS :], logits="all"))
    return np.concatenate(rows)


def compare(found: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """How far two sets of logits are apart."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    ordered = np.sort(expected, axis=-1)
    margin = ordered[:, -1] - ordered[:, -2]
    clear = margin > 6 * STATED_ERROR * expected.std(axis=-1)
    same = found.argmax(-1) == expected.argmax(-1)
    return {
        "relative_l2": error,
        "finite": bool(np.isfinite(found).all()),
        "clear_tokens": int(clear.sum()),
        "clear_tokens_wrong": int((clear & ~same).sum()),
    }


def check(plan_path: Path, placements: int, threads: int) -> list[dict[str, Any]]:
    """Compare all placements with the CPU alone."""
    from atsc.runtime import loader

    rng = np.random.default_rng(0)
    with loader.load(plan_path, threads=threads, device=False) as plan:
        ids = rng.integers(0, plan.vocab_size, PROMPT + STEPS + 3).tolist()
        num_units = plan.num_units
        expected = logits_of(plan, ids)
    cases: list[tuple[str, list[bool] | None]] = [
        ("planned", None),
        ("all on the GPU", [True] * num_units),
        ("none on the GPU", [False] * num_units),
    ]
    cases += [
        (f"random {index}", (rng.random(num_units) < rng.random()).tolist())
        for index in range(placements)
    ]
    results = []
    for name, bits in cases:
        begin = time.perf_counter()
        try:
            with loader.load(plan_path, threads=threads, on_device=bits) as plan:
                found = compare(logits_of(plan, ids), expected)
                found["device_bytes"] = plan.device_bytes
                found["predicted_device_bytes"] = plan.predicted_device_bytes
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        results.append({"placement": name, **found, "seconds": time.perf_counter() - begin})
        print(json.dumps(results[-1]), flush=True)
    return results


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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            maker = [sys.executable, ROOT / "benchmarks/make_model.py", args.make, "--onnx"]
            subprocess.run(
                [*maker, "--layers", str(args.layers), "--out", model], check=True, cwd=ROOT
            )
        plan = Path(folder) / "model.atsplan"
        compiler = [sys.executable, "-m", "atsc.compiler.cli", "compile", model, "-o", plan]
        options = ["--vram", args.vram, "--ctx", "256", "--chunk", "128", "-v"]
        subprocess.run([*compiler, *options, "--target", args.target], check=True)
        results = check(plan, args.placements, args.threads)
    wrong = [
        r
        for r in results
        if r.get("clear_tokens_wrong") != 0 or not r.get("finite") or "error" in r
    ]
    print(f"{len(results)} placements, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
