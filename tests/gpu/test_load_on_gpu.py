"""What load_on_gpu.py compares: no GPU is needed here, the virtual device gives the CPU's bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from load_on_gpu import PROMPT, check, stretches

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.passes import partition
from atsc.runtime import loader

MODEL = Path(__file__).parents[1] / "data" / "llama3-int4-cpu" / "model.onnx"
LATE_NS = 20e6
TOKENS = 110


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("load") / "p.atsplan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MIN_UNIT_BYTES", 1)
        compile_model(
            CompileOptions(
                model=MODEL, output=output, ctx=128, chunk=32, target="virtual", vram_bytes=64 << 20
            )
        )
    return output


@pytest.mark.toolchain
def test_positions_are_shown_choice_by_choice(folder: Path) -> None:
    ids = np.random.default_rng(4).integers(0, 100, TOKENS).tolist()
    with loader.load(folder, threads=2, device=False) as plan, plan.session() as session:
        session.prefill(ids[:PROMPT], logits="none")
        expected = [session.decode(token) for token in ids[PROMPT:]]
        units = range(plan.num_units)

    @contextlib.contextmanager
    def late() -> Iterator[None]:
        plan.script_device("wake", LATE_NS)
        yield

    with loader.load(folder, threads=2, on_device=[bool(unit % 2) for unit in units]) as plan:
        found = list(stretches(plan, ids, late()))
    assert len(found) > 1
    assert found[0][0] == "as planned" and "retreat" in found[1][0]
    assert [at for _, positions, _ in found for at in positions] == list(range(PROMPT, TOKENS))
    for _, positions, rows in found:
        for position, row in zip(positions, rows, strict=True):
            assert np.array_equal(row, expected[position - PROMPT])


@pytest.mark.toolchain
def test_logits_that_differ_are_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = check(folder, TOKENS, contextlib.nullcontext(), threads=2, transfer="static")
    assert found["right"] and found["relative_l2"] == 0
    assert found["tokens"] == TOKENS - PROMPT

    decode = loader.Session.decode

    def wrong_on_the_device(session: loader.Session, token: int) -> np.ndarray:
        return decode(session, token) * np.float32(1.1 if session.plan.device_name else 1)

    monkeypatch.setattr(loader.Session, "decode", wrong_on_the_device)
    (found,) = check(folder, TOKENS, contextlib.nullcontext(), threads=2, transfer="static")
    assert not found["right"] and found["relative_l2"] == pytest.approx(0.1, rel=1e-3)
