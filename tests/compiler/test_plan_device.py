"""What plan.json says of units' costs and of a GPU: it round-trips, and damage is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_plan import write_gpu_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.compiler import plan
from atsc.compiler.check_plan import check_content
from atsc.compiler.errors import PlanError
from atsc.compiler.plan_json import encode_manifest

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
finite = scalars.filter(lambda v: not isinstance(v, float) or abs(v) != float("inf"))
documents = st.recursive(
    finite, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@dataclasses.dataclass(frozen=True)
class Holder:
    value: Any


@settings(deadline=None)
@given(documents)
def test_json_text_means_what_was_written(value: Any) -> None:
    text = encode_manifest(Holder(value)).decode("utf-8")
    assert json.loads(text) == {"value": value}
    assert text.endswith("}\n")


def test_numbers_share_a_line_and_nothing_else_does() -> None:
    value = {"sizes": [1, 2.5, None], "names": ["a"], "flat": {"x": 1}, "deep": {"y": [3]}, "e": []}
    lines = encode_manifest(Holder(value)).decode("utf-8").splitlines()
    for expected in ('"sizes": [1, 2.5, null],', '"a"', '"flat": {"x": 1},', '"y": [3]', '"e": []'):
        assert expected in [line.strip() for line in lines]


def test_round_trip(tmp_path: Path) -> None:
    for name, vram_bytes in (("gpu", 306 << 20), ("cpu", None)):
        written = write_gpu_plan(tmp_path / name, vram_bytes=vram_bytes)
        assert plan.load(tmp_path / name) == written
        assert (written.device is None) == (vram_bytes is None)
        check_content(written, tmp_path / name)


def test_rungs_get_better_and_the_last_is_what_the_units_say(tmp_path: Path) -> None:
    manifest = write_gpu_plan(tmp_path / "p")
    assert manifest.device is not None
    rungs = manifest.device.rungs
    assert len(rungs) > 2
    chunk, share = manifest.options.chunk, manifest.device.prompt_share
    tokens = [(1 - share) * r.decode_ns + share * r.prefill_ns / chunk for r in rungs]
    assert tokens == sorted(tokens, reverse=True)
    assert all(bool(r.slot_bytes) == bool(r.num_slots) for r in rungs)
    assert all(r.prefill_ns <= r.static_prefill_ns for r in rungs)
    assert all(rung.required_bytes <= manifest.device.budget_bytes for rung in rungs)
    fixed = manifest.device.fixed_bytes
    assert all(r.required_bytes == fixed + r.resident_bytes + r.slot_bytes for r in rungs)
    bits = "".join("1" if unit.residency == "vram" else "0" for unit in manifest.units)
    assert rungs[-1].on_device == bits
    assert rungs[-1].decode_ns < rungs[0].decode_ns


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["device"].update(rungs=[]), "no rungs"),
        (lambda d: d["device"]["rungs"][1].update(on_device="1"), "rung 1 does not say"),
        (lambda d: d["device"].update(watts=300), "unknown field device.watts"),
        (lambda d: d["device"]["link"].pop("to_cpu_ns"), "field device.link.to_cpu_ns is missing"),
        (lambda d: d["units"][1]["cost"].update(layer="1"), "units[1].cost.layer is not"),
        (lambda d: d["units"][1]["cost"]["decode"].update(flops=[1.5]), "decode.flops[0] is not"),
    ],
)
def test_damage(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    write_gpu_plan(tmp_path / "p")
    data = json.loads((tmp_path / "p" / "plan.json").read_text())
    change(data)
    (tmp_path / "p" / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        check_content(plan.load(tmp_path / "p"), tmp_path / "p")
    assert message in str(caught.value)
    assert ";" in str(caught.value)
