"""What placements_on_gpu.py places and what it lets pass: no GPU is needed here.

The virtual device has the kernels of the CPU, so that all placements give its very bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_plan import Shape, write_gpu_plan
from placements_on_gpu import (
    LAST,
    STEPS,
    check,
    compare,
    expected_of,
    fixed_placements,
    is_right,
    read_texts,
    shown,
    spread,
    summary,
)

from atsc.compiler import plan
from atsc.compiler.driver import CompileOptions, compile_model
from atsc.passes import partition

MODEL = Path(__file__).parents[1] / "data" / "llama3-int4-cpu" / "model.onnx"


def test_splits_by_layers(tmp_path: Path) -> None:
    write_gpu_plan(tmp_path / "p", Shape(layers=5), vram_bytes=512 << 20)
    manifest = plan.load(tmp_path / "p")
    cases = dict(fixed_placements(manifest))
    assert cases["planned"] is None
    assert set(cases["all on the GPU"] or ()) == {True}
    assert set(cases["none on the GPU"] or ()) == {False}
    for name, chosen in (
        ("first half of the layers", {0, 1}),
        ("second half of the layers", {2, 3, 4, "head"}),
        ("every second layer", {1, 3}),
    ):
        bits = cases[name]
        assert bits is not None and len(bits) == len(manifest.units)
        placed = set()
        for unit, on_device in zip(manifest.units, bits, strict=True):
            if unit.cost:
                key = unit.cost.part if unit.cost.layer is None else unit.cost.layer
                assert on_device == (key in chosen), unit.name
                placed |= {key} if on_device else set()
        assert placed == chosen


@pytest.mark.parametrize(
    ("level", "changes", "right"),
    [
        (1, {"perplexity_ratio": 1.0029}, True),
        (1, {"perplexity_ratio": 1.0031}, False),
        (1, {"perplexity_ratio": 0.9969}, False),
        (4, {"perplexity_ratio": 1.004}, True),
        (4, {"perplexity_ratio": 0.994}, False),
        (4, {"clear_tokens_wrong": 1}, False),
        (4, {"finite": False}, False),
        (4, {"error": "why"}, False),
    ],
)
def test_what_passes(level: int, changes: dict[str, Any], right: bool) -> None:
    result = {"finite": True, "clear_tokens_wrong": 0, "perplexity_ratio": 1.0}
    assert is_right({**result, "standard_error": 0.001, **changes}, True, level) == right
    if "perplexity_ratio" in changes:
        assert is_right({**result, "standard_error": 0.001, **changes}, False, level)


def test_tokens_count_where_the_margin_is_clear() -> None:
    logits = np.array([[0, 1, 9], [8, 8.1, 0]], np.float32)
    found = logits[:, ::-1]
    for stated_error, clear in ((4e-2, 1), (2e-3, 2)):
        expected = expected_of(logits, [0, 1], stated_error)
        changed = summary([compare(found, expected)], [expected])
        assert changed["clear_tokens"] == clear
        assert changed["clear_tokens_wrong"] == 1
        assert summary([compare(logits, expected)], [expected])["clear_tokens_wrong"] == 0


def test_figures_are_over_all_tokens_of_all_texts() -> None:
    """Against the formulas written down plainly, for texts of more than a block of rows."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 50, count).tolist() for count in (40, 17, 23)]
    theirs = [rng.normal(0, 3, (len(text), 50)).astype(np.float32) for text in texts]
    ours = [(each + rng.normal(0, 0.3, each.shape)).astype(np.float32) for each in theirs]
    expected = [expected_of(*pair, 4e-2) for pair in zip(theirs, texts, strict=True)]
    found = summary([compare(*pair) for pair in zip(ours, expected, strict=True)], expected)

    def losses(logits: list[np.ndarray]) -> list[float]:
        return [
            -float(np.log(np.exp(row.astype(np.float64))[token] / np.exp(row).sum(dtype=float)))
            for text, rows in zip(texts, logits, strict=True)
            for row, token in zip(rows[:-1], text[1:], strict=True)
        ]

    change = np.subtract(losses(ours), losses(theirs))
    a, b = np.concatenate(ours).astype(np.float64), np.concatenate(theirs).astype(np.float64)
    ordered = np.sort(b)
    clear = ordered[:, -1] - ordered[:, -2] > 0.24 * b.std(-1)
    wrong = clear & (a.argmax(-1) != b.argmax(-1))
    assert 0 < wrong.sum() < clear.sum() < 80
    assert (found["clear_tokens"], found["clear_tokens_wrong"]) == (clear.sum(), wrong.sum())
    assert (found["tokens"], len(change), found["finite"]) == (80, 77, True)
    assert found["perplexity_ratio"] == pytest.approx(np.exp(change.mean()), abs=1e-6)
    assert found["standard_error"] == pytest.approx(change.std() / 77**0.5, rel=1e-5)
    assert found["relative_l2"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("scale", "within"), [(1e-5, True), (1, False)])
def test_whether_a_ratio_is_within_the_limit_alone(scale: float, within: bool) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, (20, 30)).astype(np.float32)
    expected = expected_of(logits, list(range(20)), 4e-2)
    moved = (logits + scale * rng.normal(0, 1, logits.shape)).astype(np.float32)
    assert summary([compare(moved, expected)], [expected])["within_change"] is within


def test_texts_of_a_file(tmp_path: Path) -> None:
    path, text = tmp_path / "ids.json", list(range(STEPS + LAST + 1))
    for content, texts in ((text, [text]), ([text, text[::-1]], [text, text[::-1]])):
        path.write_text(json.dumps(content))
        assert read_texts(path, len(text)) == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[1] * 20, [1] * 41], r"text 1 has 41 tokens; give at least --ctx 41$"),
        ([[1] * 20, [1] * 5], r"text 1 has 5 tokens; give at least 14$"),
        ([], r"text 0 has 0 tokens; give at least 14$"),
        ([1.5] * 20, r"text 0 is not a list of token ids"),
        ([[1] * 20, 7], r"text 1 is not a list of token ids"),
        ({"ids": [1] * 20}, r"text 0 is not a list of token ids"),
    ],
)
def test_texts_that_do_not_fit(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=message):
        read_texts(path, 40)
    path.write_text("[1, 2")
    with pytest.raises(SystemExit, match=r"ids\.json: .*delimiter"):
        read_texts(path, 40)


@pytest.mark.toolchain
def test_all_splits_run_on_the_virtual_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(partition, "MIN_UNIT_BYTES", 1)
    output = tmp_path / "p.atsplan"
    compile_model(
        CompileOptions(*(MODEL, output), ctx=128, chunk=32, target="virtual", vram_bytes=64 << 20)
    )
    texts = [list(range(40)), list(range(70, 20, -1))]
    results = check(output, 1, threads=2, texts=texts, level=4)
    names = [name for name, _ in fixed_placements(plan.load(output))]
    assert [result["placement"] for result in results] == [*names, "random 0"]
    for result in results:
        assert is_right(result, is_text=True, level=4), result
        assert (result["relative_l2"], result["perplexity_ratio"]) == (0, 1)
        assert result["tokens"] == 90
        assert result["device_bytes"] == result["predicted_device_bytes"]
    sizes = {result["placement"]: result["device_bytes"] for result in results}
    halves = sizes["first half of the layers"], sizes["second half of the layers"]
    assert sizes["none on the GPU"] < min(halves) and max(halves) < sizes["all on the GPU"]
    assert len(capsys.readouterr().out.splitlines()) == len(results)


def test_lines_of_the_table() -> None:
    result = {"placement": "planned", "perplexity_ratio": 1.0042, "standard_error": 0.001}
    line = shown({**result, "relative_l2": 0.015, "clear_tokens": 9, "clear_tokens_wrong": 0})
    assert "planned" in line and "1.00420 +- 0.00100" in line and "0 of 9 clear" in line
    assert shown({"placement": "random 3", "error": "why"}).endswith("why")


def test_line_of_all_placements() -> None:
    results: list[dict[str, Any]] = [
        {"placement": "planned", "perplexity_ratio": 1.001, "within_change": True},
        {"placement": "random 1", "perplexity_ratio": 0.995, "within_change": False},
        {"placement": "random 2", "error": "why"},
    ]
    line = spread(results)
    assert "0.99800 on average, furthest 0.99500 (random 1)" in line
    assert line.endswith("1 of 3 placements within 0.3%")
    assert spread(results[2:]) == "perplexity: no placement ran"
