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
from atsc.runtime.rounds import Change
from atsc.targets import target as targets

MODEL = Path(__file__).parents[1] / "data" / "llama3-int4-cpu"
WAKE_NS = 4e6
ATTEMPTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for a virtual device whose hand-offs take as long as threads of a busy machine do.

    Else it seems late before it is told to be.
    """
    made = tmp_path_factory.mktemp("rounds")
    output, target = made / "model.atsplan", made / "threads.toml"
    text = Path(targets.__file__).with_name("virtual.toml").read_text("utf-8")
    assert "hand_off_ns = 20000.0" in text
    target.write_text(text.replace("hand_off_ns = 20000.0", "hand_off_ns = 200000.0"), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MIN_UNIT_BYTES", 1)
        model = MODEL / "model.onnx"
        options = CompileOptions(
            model=model, output=output, ctx=96, chunk=32, target=str(target), vram_bytes=64 << 20
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


def run_beside_a_late_device(folder: Path, transfer: Transfer) -> tuple[list[int], list[Change]]:
    """Times of decode steps once the device comes back late, and retreats; logits are the CPU's."""
    with load(folder, device=False) as plan:
        expected, units = logits_of(plan), range(plan.num_units)
    with load(folder, on_device=[bool(unit % 2) for unit in units], transfer=transfer) as plan:
        with plan.session() as session:
            session.prefill([3, 1, 4], logits="none")
            for _ in range(12):
                session.decode(1)
            plan.script_device("wake", WAKE_NS)
            taken_ns = []
            for _ in range(30):
                begin_ns = time.perf_counter_ns()
                session.decode(5)
                taken_ns.append(time.perf_counter_ns() - begin_ns)
        assert np.array_equal(logits_of(plan), expected)
        assert min(taken_ns[:3]) > WAKE_NS
        return taken_ns, [change for change in plan.take_changes() if change.num_retreated]


@pytest.mark.toolchain
def test_units_retreat_from_a_device_that_comes_back_late(folder: Path) -> None:
    """In one of some attempts.

    A busy machine may slow down the CPU's and the device's kernels at the same moment, for which
    units retreat as well, or the steps after it.
    """
    seen = []
    for _ in range(ATTEMPTS):
        taken_ns, changes = run_beside_a_late_device(folder, "load-aware")
        for change in changes:
            assert change.host_bytes > 0
            assert f"{change.num_retreated} units retreat (" in str(change)
        seen.append((min(taken_ns[-3:]), changes))
        reason = r"(the GPU spins, )?units retreat: (.*, )?GPU comes back \d+ times as late"
        is_for_that = changes and re.match(reason, changes[0].reason)
        if is_for_that and min(taken_ns[-3:]) < WAKE_NS:
            return
    pytest.fail(f"no attempt was as expected: {seen}")


@pytest.mark.toolchain
def test_nothing_retreats_where_all_shall_stay_as_it_is(folder: Path) -> None:
    taken_ns, changes = run_beside_a_late_device(folder, "static")
    assert not changes
    assert min(taken_ns[-3:]) > WAKE_NS


@pytest.mark.toolchain
def test_an_unknown_way_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="rounds is 'fast': expected one of graph, launches"):
        load(folder, rounds="fast")  # type: ignore[arg-type]
