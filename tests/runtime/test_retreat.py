"""Units that retreat from a GPU that comes back late, on the virtual device.

Whatever sessions do meanwhile, the logits are the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.passes import partition
from atsc.runtime.loader import F32Array, Plan, load

MODELS = Path(__file__).parents[1] / "data"
WAKE_NS = 4e6
STEPS_TO_RETREAT = 40

pytestmark = pytest.mark.toolchain


def compile_for_both(model: str, output: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MIN_UNIT_BYTES", 1)
        options = CompileOptions(
            model=MODELS / model / "model.onnx",
            output=output,
            ctx=96,
            chunk=32,
            target="virtual",
            vram_bytes=64 << 20,
        )
        compile_model(options)
    return output


def wake(plan: Plan, ns: float) -> None:
    if plan.device_name:
        plan.script_device("wake", ns)


def talk(plan: Plan, ids: list[int], folder: Path) -> list[F32Array]:
    """Two sessions and a GPU that gets late: logits of decode steps and of chunks in between."""
    found: list[F32Array] = []
    with plan.session() as one, plan.session() as other:
        one.prefill(ids[:40], logits="none")
        other.prefill(ids[5:30], logits="none")
        found += [one.decode(token) for token in ids[40:54]]
        wake(plan, WAKE_NS)
        for step in range(STEPS_TO_RETREAT):
            if step % 16 == 0:
                one.rewind(36)
            found.append(one.decode(ids[step]))
        # `one` has retreated; `other` follows with a step, and goes to the GPU for its chunk.
        found += [other.decode(token) for token in ids[:4]]
        found.append(other.prefill(ids[10:32], logits="all"))
        found += [other.decode(token) for token in ids[4:8]]
        other.save(folder / "other")
        one.save(folder / "one")
        other.rewind(20)
        found += [other.decode(token) for token in ids[8:10]]
        one.restore(folder / "other")
        other.restore(folder / "one")
        found += [session.decode(token) for token in ids[10:13] for session in (one, other)]
        found.append(one.prefill(ids[:9], logits="all"))
        one.rewind(0)
        found.append(one.prefill(ids[:35], logits=[3, 34]))
        found += [one.decode(token) for token in ids[35:38]]
        wake(plan, 0)
    with plan.session() as fresh:  # in a place whose caches are on the host
        fresh.prefill(ids[:3], logits="none")
        fresh.restore(folder / "one")
        found += [fresh.decode(token) for token in ids[20:24]]
    return found


@pytest.mark.parametrize("model", ["llama3-int4-cpu", "qwen3-int4gather-cpu"])
def test_sessions_whose_units_retreat(model: str, tmp_path: Path) -> None:
    folder = compile_for_both(model, tmp_path / "model.atsplan")
    ids = [int(token) for token in np.load(MODELS / model / "expected.npz")["ids"]]
    with load(folder, device=False, sessions=2) as plan:
        expected, units = talk(plan, ids, tmp_path), range(plan.num_units)
    with load(folder, on_device=[bool(unit % 2) for unit in units], sessions=2) as plan:
        got = talk(plan, ids, tmp_path)
        retreats = [change.num_retreated for change in plan.take_changes()]
    assert any(retreats), "the GPU was late"
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(one, other), f"logits {number}"
