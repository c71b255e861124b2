"""Rounds on host and device together, on the virtual device: right under any placement.

Two small real models are compiled for it with one unit a matrix, so that placements have much to
cut, and with streaming from few rows on. The virtual device computes with the CPU's kernels, so
every placement must give the very bits of the CPU alone.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fake_plan import FakeTokenizer

from atsc.compiler import cli
from atsc.compiler.driver import CompileOptions, compile_model
from atsc.compiler.errors import CancelledError, DeviceError, UsageError
from atsc.passes import partition
from atsc.passes.rungs import Candidate, RungRequest, is_streamed
from atsc.runtime import capi, loader
from atsc.runtime.loader import F32Array, Plan, load

pytestmark = pytest.mark.toolchain

DATA = Path(__file__).parents[1] / "data"
MODELS = ("llama3-int4-cpu", "qwen3-int4gather-cpu")
CONTEXT, CHUNK, STREAM_FROM = 96, 32, 20
PLACEMENTS = 100  # a model


def two_slots(request: RungRequest) -> Iterator[Candidate]:
    """Of the largest weights, though such a small model gains nothing by them."""
    yield Candidate(max(unit.num_bytes for unit in request.costs.units if is_streamed(unit)), 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("hybrid")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "MIN_UNIT_BYTES", 1)
        patch.setattr("atsc.passes.rungs.stream_from_rows", lambda *_: STREAM_FROM)
        patch.setattr("atsc.passes.rungs.slot_candidates", two_slots)
        for model in MODELS:
            found[model] = directory / f"{model}.atsplan"
            options = CompileOptions(
                model=DATA / model / "model.onnx",
                output=found[model],
                ctx=CONTEXT,
                chunk=CHUNK,
                target="virtual",
                vram_bytes=64 << 20,
            )
            compile_model(options)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[F32Array]]:
    found = {}
    for model, folder in folders.items():
        with load(folder, device=False, threads=2) as plan:
            assert plan.device_name is None and plan.placement is None
            found[model] = run_all(plan, ids_of(model))
    return found


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders[MODELS[0]]


def ids_of(model: str) -> list[int]:
    return [int(token) for token in np.load(DATA / model / "expected.npz")["ids"]]


def run_all(plan: Plan, ids: list[int]) -> list[F32Array]:
    """Every kind of round: chunks that stream (some the head too), many rows, few, and decode."""
    with plan.session() as session:
        parts = [
            session.prefill(ids[:CHUNK], logits=[3, CHUNK - 1]),
            session.prefill(ids[CHUNK:44], logits="all"),
            session.prefill(ids[44:49], logits=[1, 4]),
            session.prefill(ids[49:50]),
            session.prefill(ids[50:58], logits="none"),
        ]
        decoded = np.stack([session.decode(token) for token in ids[58:66]])
        return [*parts, session.prefill(ids[66:CONTEXT], logits="all"), decoded]


def assert_equal(got: list[F32Array], expected: list[F32Array], what: object = "") -> None:
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(one, other), f"round {index} differs {what}"


def draw(rng: np.random.Generator, count: int) -> list[bool]:
    """Random bits, in runs of random length."""
    share, length = rng.random(), rng.integers(1, 6)
    drawn = np.repeat(rng.random(count) < share, length)[:count]
    return [bool(bit) for bit in drawn]


@pytest.mark.parametrize("model", MODELS)
def test_any_placement_gives_the_bits_of_the_cpu(
    folders: dict[str, Path], expected: dict[str, list[F32Array]], model: str
) -> None:
    ids, rng = ids_of(model), np.random.default_rng(5)
    with load(folders[model], device=False) as plan:
        num_units = plan.num_units
    assert num_units > 12
    for number in range(PLACEMENTS):
        bits = draw(rng, num_units)
        with load(folders[model], on_device=bits, threads=1 + number % 2) as plan:
            assert plan.device_name
            assert_equal(run_all(plan, ids), expected[model], bits)
            assert plan.device_bytes <= plan.predicted_device_bytes


def alternate(plan_folder: Path, **options: object) -> Plan:
    """The most hand-offs: every other unit on the device."""
    with load(plan_folder, device=False) as plan:
        bits = [bool(unit % 2) for unit in range(plan.num_units)]
    return load(plan_folder, on_device=bits, threads=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "virtual_device",
    [
        capi.VirtualDevice(no_graphs=1),
        capi.VirtualDevice(link_bytes_per_s=200e6),
        capi.VirtualDevice(context_bytes=1 << 20),
    ],
    ids=["no graphs", "slow link", "context"],
)
def test_other_devices(
    folder: Path, expected: dict[str, list[F32Array]], virtual_device: capi.VirtualDevice
) -> None:
    with alternate(folder, virtual_device=virtual_device) as plan:
        assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])


def test_a_device_that_changes_its_speed(folder: Path, expected: dict[str, list[F32Array]]) -> None:
    """Slower and faster in the middle of rounds: nothing depends on who is first."""
    with alternate(folder) as plan:
        done = threading.Event()

        def change() -> None:
            rng = np.random.default_rng(2)
            while not done.is_set():
                plan.script_device("slowdown", float(rng.uniform(1, 20)))
                plan.script_device("link", float(10 ** rng.uniform(7.5, 10)))
                time.sleep(0.002)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(3):
                assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])
        finally:
            done.set()
            thread.join()


def test_sessions_on_the_device_are_apart(
    folder: Path, expected: dict[str, list[F32Array]]
) -> None:
    results: dict[int, list[F32Array]] = {}
    with alternate(folder, sessions=3) as plan:

        def work(index: int) -> None:
            results[index] = run_all(plan, ids_of(MODELS[0]))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 3
    for result in results.values():
        assert_equal(result, expected[MODELS[0]])


def test_saved_and_restored_between_sides(
    folder: Path, expected: dict[str, list[F32Array]], tmp_path: Path
) -> None:
    """A session saved from the device goes on there, on the CPU, and after a rewind."""
    ids, decoded = ids_of(MODELS[0]), expected[MODELS[0]][-1]
    with load(folder, threads=2) as plan, plan.session() as session:
        # In the rounds of run_all(): few rows and many do not sum in the same order.
        for begin, end in pairwise((0, CHUNK, 44, 49, 50, 58)):
            session.prefill(ids[begin:end])
        session.save(tmp_path / "state")
        session.prefill([1, 2, 3])
        session.restore(tmp_path / "state")
        assert np.array_equal(session.decode(ids[58]), decoded[0])
        session.prefill([1, 2, 3])
        session.rewind(59)
        assert np.array_equal(session.decode(ids[59]), decoded[1])
    with load(folder, device=False) as plan, plan.session() as session:
        session.restore(tmp_path / "state")
        got = [session.decode(token) for token in ids[58:66]]
        assert np.array_equal(np.stack(got), decoded)


@pytest.mark.parametrize("rows", [1, CHUNK])
def test_cancel_in_the_middle(folder: Path, expected: dict[str, list[F32Array]], rows: int) -> None:
    ids = ids_of(MODELS[0])
    with alternate(folder) as plan, plan.session() as session:
        session.prefill(ids[:8])
        plan.script_device("kernel ", 20e6)
        caught: list[BaseException] = []

        def work() -> None:
            try:
                session.prefill(ids[8 : 8 + rows])
            except CancelledError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        session.cancel()
        thread.join()
        assert len(caught) == 1 and "cancelled at token 8" in str(caught[0])
        assert session.position == 8
        plan.script_device("kernel ", 0)
        session.rewind(0)
        got = session.prefill(ids[:CHUNK], logits=[3, CHUNK - 1])
        assert np.array_equal(got, expected[MODELS[0]][0])


def test_a_fault_ends_the_round_and_is_reported(folder: Path) -> None:
    with alternate(folder) as plan, plan.session() as session:
        session.prefill([1, 2, 3])
        plan.script_device("fault ")
        with pytest.raises(DeviceError, match="fault in kernel"):
            session.decode(4)
        assert session.position == 3
        with pytest.raises(DeviceError, match="fault in kernel"):
            session.decode(4)


def rungs(folder: Path) -> Iterator[tuple[int, int]]:
    """(placement, bytes that it needs), from the one that needs most."""
    with load(folder) as plan:
        assert plan.placement == plan.num_placements - 1 and not plan.notice
        found = plan.placement, plan.predicted_device_bytes
    while True:
        yield found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            plan = load(folder, vram=found[1] - 1)
        with plan:
            if plan.placement is None:
                return
            found = plan.placement, plan.predicted_device_bytes


def test_each_rung_fits_what_it_says(folder: Path, expected: dict[str, list[F32Array]]) -> None:
    """The virtual device refuses a byte more than it was given."""
    seen = []
    for rung, needed in rungs(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            plan = load(folder, vram=needed, threads=2)
        with plan:
            assert plan.placement == rung
            assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])
            assert plan.device_bytes <= needed
        seen.append(rung)
    assert len(seen) >= 2 and seen == sorted(seen, reverse=True)


def test_less_memory_takes_a_lower_rung_and_says_so(
    folder: Path, expected: dict[str, list[F32Array]]
) -> None:
    (_, most), (second, less), *_ = rungs(folder)
    occupied = capi.VirtualDevice(occupied_bytes=(64 << 20) - less)
    with pytest.warns(RuntimeWarning, match=r"instead of \d+\.\d: using placement \d of \d"):
        plan = load(folder, virtual_device=occupied)
    with plan:
        assert plan.placement == second
        assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])
    with pytest.raises(DeviceError, match="using placement"):
        load(folder, virtual_device=occupied, strict=True)
    with load(folder, vram=most, strict=True) as plan:
        assert plan.device_bytes <= most


def test_no_memory_at_all_runs_on_the_cpu_and_says_so(
    folder: Path, expected: dict[str, list[F32Array]]
) -> None:
    with pytest.warns(RuntimeWarning, match="smallest placement needs .*on the CPU alone"):
        plan = load(folder, vram="100K")
    with plan:
        assert plan.placement is None and plan.device_name is None
        assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])
    with pytest.raises(DeviceError, match="smallest placement needs"):
        load(folder, vram="100K", strict=True)


def test_what_cannot_be_pinned(folder: Path, expected: dict[str, list[F32Array]]) -> None:
    """Weights fall back to pageable memory; without pinned activations the CPU does everything."""
    some = capi.VirtualDevice(limits_pinning=1, pinnable_bytes=450 << 10)
    with pytest.warns(RuntimeWarning, match=r"refuses to pin \d+\.\d MiB of weights"):
        plan = alternate(folder, virtual_device=some)
    with plan:
        assert plan.device_name
        assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])
    none = capi.VirtualDevice(limits_pinning=1, pinnable_bytes=0)
    with pytest.warns(RuntimeWarning, match=r"refuses to pin .* on the CPU alone"):
        plan = alternate(folder, virtual_device=none)
    with plan:
        assert plan.device_name is None
        assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])


def test_options_are_checked(folder: Path) -> None:
    for vram, message in (("6X", "is no size"), (0, "at least 1 byte")):
        with pytest.raises(UsageError, match=message):
            load(folder, vram=vram)
    with pytest.raises(UsageError, match="num_units is 2: the plan has"):
        load(folder, on_device=[True, False])
    with load(folder, device=False) as plan, pytest.raises(UsageError, match="only a virtual"):
        plan.script_device("link", 1e9)
    with load(folder) as plan:
        with pytest.raises(UsageError, match="expected link, slowdown"):
            plan.script_device("speed", 1)
        with pytest.raises(UsageError, match="without placements"):
            plan.profile_link()


@pytest.mark.parametrize("slow", ["link", "kernels"])
def test_everything_streams_through_two_slots(
    folder: Path, expected: dict[str, list[F32Array]], slow: str
) -> None:
    """A copy waits until its slot was used, a kernel until its slot was filled."""
    with load(folder, device=False) as plan:
        nothing = [False] * plan.num_units
    with load(folder, on_device=nothing, threads=2) as plan:
        if slow == "link":
            plan.script_device("link", 100e6)
        else:
            plan.script_device("kernel ", 0.3e6)
        for _ in range(3):
            assert_equal(run_all(plan, ids_of(MODELS[0])), expected[MODELS[0]])


def test_events_of_a_round(folder: Path) -> None:
    """Copies on a slow link take their time, one after the other, and the device waits for them."""
    rate = 20e6
    slow = capi.VirtualDevice(link_bytes_per_s=rate)
    with alternate(folder, virtual_device=slow, transfer="none") as plan:
        assert plan.events() == []
        with plan.session() as session:
            session.prefill([5] * CHUNK)
            streamed = plan.events()
            session.decode(5)
            decoded = plan.events()
        sizes = [unit.bytes for unit in plan.manifest.units]
    for events in (streamed, decoded):
        times = [(event.begin_ns, event.end_ns) for event in events]
        assert all(begin <= end for begin, end in times)
        assert max(end for _, end in times) - min(begin for begin, _ in times) < 60e9
    assert {event.track for event in decoded} == {"cpu", "cpu wait", "device"}
    segments = [event for event in decoded if event.track == "cpu"]
    assert len(segments) > 3
    assert all(one.end_ns <= other.begin_ns for one, other in pairwise(segments))

    copies = [event for event in streamed if event.track == "copy"]
    assert len(copies) > 3
    for copy in copies:
        assert copy.end_ns - copy.begin_ns > 0.95 * sizes[copy.number] / rate * 1e9
    waits = {event.number: event for event in streamed if event.track == "device wait"}
    assert all(waits[copy.number].end_ns >= copy.end_ns for copy in copies)
    assert sum(wait.end_ns - wait.begin_ns for wait in waits.values()) > 0


@pytest.mark.parametrize("transfer", ["load-aware", "static", "none"])
def test_run_tells_when_promotions_change(
    folder: Path,
    transfer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All weights on the host, which is suddenly a hundred times as slow."""
    with load(folder, device=False) as plan:
        num_units = plan.num_units
    asked: list[dict[str, object]] = []

    def load_slow(path: Path, **options: object) -> Plan:
        asked.append(options)
        plan = load(path, on_device=[False] * num_units, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(plan, "_tokenizer", FakeTokenizer())
        plan.script_device("cpu", 100)
        return plan

    monkeypatch.setattr(loader, "load", load_slow)
    flags = ("--transfer", transfer, "--drift-threshold", "0.5", "--reschedule-interval", "8")
    flags += ("--yield-gpu",)
    more = ("--threads", "1", "-n", "40", "--temperature", "0")
    assert cli.main(["run", str(folder), "-p", "abc", "-v", *flags, *more]) == 0
    (options,) = asked
    numbers = {"drift_threshold": 0.5, "reschedule_interval": 8, "yield_gpu": True}
    assert options == {
        "transfer": transfer,
        "threads": 1,
        "vram": None,
        "verify": False,
        **numbers,
    }
    shown = capsys.readouterr().err
    told = re.findall(r"^[\d.]+ s: decode promotes .*", shown, re.MULTILINE)
    expected = r".* promotes \d+ units, \d+\.\d MiB \(.*CPU [\d.]+ times as slow.*\); expected: .*"
    assert any(re.fullmatch(expected, line) for line in told) == (transfer == "load-aware"), told
    assert transfer != "none" or not told
    assert all(shown.index(line) < shown.index("text: 40 tokens") for line in told)
