"""How rounds run on the device: whichever way, the logits are the CPU's, on the virtual device."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.compiler.errors import UsageError
from atsc.passes import partition
from atsc.runtime.loader import F32Array, Plan, Rounds, Transfer, load

MODEL = Path(__file__).parents[1] / "data" / "llama3-int4-cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("rounds") / "model.atsplan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MIN_UNIT_BYTES", 1)
        model = MODEL / "model.onnx"
        options = CompileOptions(
            model=model, output=output, ctx=96, chunk=32, target="virtual", vram_bytes=64 << 20
        )
        compile_model(options)
    return output


def logits_of(plan: Plan) -> F32Array:
    ids = [int(token) for token in np.load(MODEL / "expected.npz")["ids"]][:40]
    with plan.session() as session:
        rows = [session.prefill(ids[:-2], logits="all")]
        rows += [session.decode(token)[None] for token in ids[-2:]]
    return np.concatenate(rows)


@pytest.mark.toolchain
@pytest.mark.parametrize("rounds", get_args(Rounds))
def test_every_way_gives_the_bits_of_the_cpu(folder: Path, rounds: Rounds) -> None:
    with load(folder, device=False) as plan:
        expected, units = logits_of(plan), range(plan.num_units)
    with load(folder, on_device=[bool(unit % 2) for unit in units], rounds=rounds) as plan:
        assert plan.device_name
        assert np.array_equal(logits_of(plan), expected)
        assert {event.track for event in plan.events()} >= {"cpu", "device"}


@pytest.mark.toolchain
@pytest.mark.parametrize("transfer", ["load-aware", "static"])
def test_units_retreat_from_a_device_that_comes_back_late(folder: Path, transfer: Transfer) -> None:
    """Unless all shall stay as it is. The logits are the same."""
    wake_ns = 4e6
    with load(folder, device=False) as plan:
        expected, units = logits_of(plan), range(plan.num_units)
    with load(folder, on_device=[bool(unit % 2) for unit in units], transfer=transfer) as plan:
        with plan.session() as session:
            session.prefill([3, 1, 4], logits="none")
            for _ in range(12):
                session.decode(1)
            plan.script_device("wake", wake_ns)
            taken_ns = []
            for _ in range(30):
                begin_ns = time.perf_counter_ns()
                session.decode(5)
                taken_ns.append(time.perf_counter_ns() - begin_ns)
        assert np.array_equal(logits_of(plan), expected)
        changes = [change for change in plan.take_changes() if change.num_retreated]
    assert min(taken_ns[:3]) > wake_ns
    if transfer == "load-aware":
        reason = rf"GPU comes back \d+ times as late.*: {changes[0].num_retreated} units retreat"
        assert re.search(reason, changes[0].reason)
        assert changes[0].host_bytes > 0
        assert f"{changes[0].num_retreated} units retreat (" in str(changes[0])
        assert min(taken_ns[-3:]) < wake_ns
    else:
        assert not changes
        assert min(taken_ns[-3:]) > wake_ns


@pytest.mark.toolchain
def test_an_unknown_way_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="rounds is 'fast': expected one of graph, launches"):
        load(folder, rounds="fast")  # type: ignore[arg-type]
