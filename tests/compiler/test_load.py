"""`bench --load`: pressure as strong as asked that ends with its parent, and what is measured."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_model
from fake_plan import FakePlan, FakeSession

from atsc.compiler import cli
from atsc.compiler.commands import load as loads
from atsc.compiler.commands.load import GpuRates, Load, Pressure, gpu_work, press
from atsc.compiler.commands.under_load import Phase
from atsc.compiler.errors import CodegenError, DeviceError
from atsc.runtime import loader
from atsc.runtime.rounds import Change

CHANGE = Change(1, "decode", "why", 3, 4096, 20, 10, 1, 1, 0, 0)


@pytest.fixture
def one_cpu() -> Any:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cpus)])
    yield
    os.sched_setaffinity(0, cpus)


def test_pressing_takes_its_share_of_the_time() -> None:
    reader, writer = os.pipe()
    spans = []

    def work(seconds: float, until: float) -> float:
        spans.append((seconds, until - time.monotonic()))
        if len(spans) == 5:
            os.write(writer, b"x")
        return seconds

    begin = time.monotonic()
    share = press(0.6, work, reader)
    elapsed = time.monotonic() - begin
    os.close(reader)
    os.close(writer)
    assert [seconds for seconds, _ in spans] == pytest.approx([0.006] * 5)
    assert all(0 < left <= loads.PERIOD_SECONDS for _, left in spans)
    # Five whole periods, though it was stopped in the last one; more if the system was late.
    periods = max(5 * loads.PERIOD_SECONDS, elapsed)
    assert 5 * 0.006 / (periods + loads.PERIOD_SECONDS) < share <= 0.6 + 1e-9


def test_cpu_pressure_spins_for_the_time_it_gets() -> None:
    cpus = os.sched_getaffinity(0)
    thread = threading.Thread(target=lambda: found.append(worked()))

    def worked() -> tuple[float, float, float]:
        work = loads._cpu_work(min(cpus))  # binds this thread alone
        before = time.thread_time()
        done = work(0.02, time.monotonic() + 10)
        late = work(10, time.monotonic() + 0.01)
        return done, late, time.thread_time() - before

    found: list[tuple[float, float, float]] = []
    thread.start()
    thread.join()
    ((done, late, total),) = found
    assert 0.02 <= done < 0.1
    assert late < 0.1, "the period is over"
    assert total == pytest.approx(done + late, abs=0.005)
    assert os.sched_getaffinity(0) == cpus


@pytest.mark.usefixtures("one_cpu")
def test_pressure_starts_presses_and_ends() -> None:
    pressure = Pressure(Load("cpu", 0.5))
    before = os.times()
    with pressure.applied():
        time.sleep(0.2)
    after = os.times()
    assert 0.02 < pressure.achieved <= 0.55
    used = after.children_user + after.children_system - before.children_user
    assert used > 0.02, "by a process that is over"


PARENT = """
import sys, time
from atsc.compiler.commands import load
started = load.subprocess.Popen
def popen(*args, **options):
    child = started(*args, **options)
    print(child.pid, flush=True)
    return child
load.subprocess.Popen = popen
with load.Pressure(load.Load("cpu", 0.05)).applied():
    print("pressed", flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("one_cpu")
def test_pressure_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"pressed\n"
        assert running(pid)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(pid)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("one_cpu")
def test_a_process_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "START_SECONDS", 0.05)
    started = subprocess.Popen
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: started(sleeper, **more))
    with (
        pytest.raises(DeviceError, match=r"--load cpu=5: its process has not answered for 0.05 s"),
        Pressure(Load("cpu", 0.05)).applied(),
    ):
        pass
    monkeypatch.setattr(loads, "START_SECONDS", 10)
    for script, message in (
        ("", "its process has ended"),
        ("""print('{"error": "no GPU"}')""", "no GPU"),
    ):
        command = [sys.executable, "-c", script]
        monkeypatch.setattr(subprocess, "Popen", lambda _, c=command, **more: started(c, **more))
        with pytest.raises(DeviceError, match=message), Pressure(Load("cpu", 0.05)).applied():
            pass


@pytest.mark.usefixtures("one_cpu")
def test_a_gpu_is_pressed_as_much_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('{\"rates\": [3.5, 7]}', flush=True); sys.stdin.read(); "
    script += "print('{\"share\": 0.5}')"
    started, commands = subprocess.Popen, []

    def popen(command: list[str], **more: Any) -> Any:
        commands.append(command)
        return started([sys.executable, "-c", script], **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    pressure = Pressure(Load("gpu", 0.6))
    for _ in range(2):
        with pressure.applied():
            pass
    assert [command[-5:] for command in commands] == [
        ["-m", loads.__name__, "gpu", "0.6", "-1"],
        ["gpu", "0.6", "-1", "3.5", "7"],
    ]


class FakeDriver:
    """A GPU of known speeds; a stream takes as long as what was put into it."""

    steps_per_s, bytes_per_s = 1e6, 50e9

    def __init__(self) -> None:
        self.streams: list[float] = []
        self.steps = self.copied = 0
        self.blocks = 0
        names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        values = dict(zip(names, (9, 0, 7), strict=True))
        self.CUdevice_attribute = SimpleNamespace(
            **{f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in values.items()}
        )
        self.CUctx_flags = SimpleNamespace(CU_CTX_SCHED_BLOCKING_SYNC=4)
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def cuDeviceGetAttribute(self, value: int, device: int) -> tuple[int, int]:
        return 0, value

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        self.streams.append(0.0)
        return 0, len(self.streams) - 1

    def cuLaunchKernel(self, function: int, *more: Any) -> tuple[int]:
        (*_, stream, pointers, _) = more
        self.blocks = more[0]
        steps = ctypes.c_uint32.from_address((ctypes.c_void_p * 3).from_address(pointers)[2]).value
        self.steps += steps
        self._add(stream, steps / self.steps_per_s)
        return (0,)

    def cuMemcpyHtoDAsync(
        self, target: int, source: int, num_bytes: int, stream: int
    ) -> tuple[int]:
        assert 0 < num_bytes <= loads.COPY_BYTES
        self.copied += num_bytes
        self._add(stream, num_bytes / self.bytes_per_s)
        return (0,)

    def _add(self, stream: int, seconds: float) -> None:
        self.streams[stream] = max(self.streams[stream], time.perf_counter()) + seconds

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        time.sleep(max(self.streams[stream] - time.perf_counter(), 0))
        return (0,)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: (0, 1)


def test_gpu_pressure_is_sized_by_what_the_gpu_does_alone() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    driver = FakeDriver()
    try:
        work, rates = gpu_work(driver)
    except CodegenError as error:  # pragma: no cover - bindings without the library
        pytest.skip(str(error))
    driver.steps = driver.copied = 0
    begin = time.perf_counter()
    assert work(0.02, 0) == 0.02
    assert time.perf_counter() - begin > 0.01, "it waits"
    assert driver.steps == pytest.approx(0.02 * driver.steps_per_s, rel=0.3)
    assert driver.copied == pytest.approx(0.02 * driver.bytes_per_s, rel=0.3)
    assert driver.blocks == 7 * loads.BLOCKS_PER_SM
    driver.steps = driver.copied = 0
    twice = GpuRates(2 * rates.steps, 2 * rates.copied_bytes)
    again, found = gpu_work(driver, twice)
    assert (driver.steps, driver.copied, found) == (0, 0, twice), "nothing to measure"
    again(0.02, 0)
    assert driver.steps == pytest.approx(0.02 * twice.steps, abs=40)
    assert driver.copied == pytest.approx(0.02 * twice.copied_bytes, abs=1)


def test_a_driver_that_fails_is_one_line() -> None:
    class Result(int):
        name = "CUDA_ERROR_OUT_OF_MEMORY"

    driver = SimpleNamespace(cuMemAlloc=lambda _: (Result(2), None))
    message = "pressing the GPU: cuMemAlloc answers CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DeviceError, match=message):
        loads._call(driver, "cuMemAlloc", 1)


def test_means_of_slices() -> None:
    phase = Phase([0.1, 0.4, 0.6, 1.7], [0.1, 0.3, 0.2, 1.1], [])
    assert phase.series_ms() == [pytest.approx(200), pytest.approx(200), None, pytest.approx(1100)]


def test_medians_of_a_part_of_the_time() -> None:
    phase = Phase([0.1, 0.2, 0.3, 0.5, 1.0], [0.1, 0.1, 0.1, 0.2, 0.5], [])
    assert phase.median_ms() == pytest.approx(100)
    assert phase.median_ms(since=0.25) == pytest.approx(200)
    assert phase.median_ms(since=0.5) == pytest.approx(500)


@pytest.mark.parametrize("text", ["cpu", "cpu=0", "cpu=101", "disk=5", "gpu=-1"])
def test_loads_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "p", "--load", text]) == 2
    assert "is no load; write cpu=60 or gpu=60" in capsys.readouterr().err


def test_flags_that_mean_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (("-n", "8,9"), "--load measures one test"),
        (("-n", "0"), "--load measures one test"),
        (("-d", "0,9"), "--load measures one test"),
        (("--transfer", "none"), "leave --transfer out"),
        (("--trace", str(tmp_path / "t")), "leave --trace out"),
    ):
        assert cli.main(["bench", str(tmp_path), "--load", "cpu=5", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_no_gpu_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = ["bench", str(tmp_path), "--load", "gpu=60"]
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert cli.main(bench) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs cuda-bindings" in line

    def missing(_: int) -> None:
        raise RuntimeError("no driver")

    fake = SimpleNamespace(driver=SimpleNamespace(cuInit=missing))
    monkeypatch.setitem(sys.modules, "cuda.bindings", fake)
    assert cli.main(bench) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs an NVIDIA GPU and its driver: no driver" in line


class SlowedSession(FakeSession):
    """Tokens take 2 ms, and 6 under pressure, on a clock that nothing else moves."""

    pressed = False
    deepest = 0
    now = 0.0

    def decode(self, token: int, *, copy: bool = True) -> None:
        super().decode(token, copy=copy)
        SlowedSession.deepest = max(self.deepest, self.position)
        SlowedSession.now += 0.006 if SlowedSession.pressed else 0.002


class DevicePlan(FakePlan):
    device_name = "virtual"
    pending = True

    def session(self) -> FakeSession:
        self.sessions.append(SlowedSession())
        return self.sessions[-1]

    def take_changes(self) -> list[Any]:
        if SlowedSession.pressed and self.pending and self.options["transfer"] == "load-aware":
            self.pending = False
            return [CHANGE]
        return []


def test_policies_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[DevicePlan] = []

    def load(path: Path, **options: Any) -> DevicePlan:
        plans.append(DevicePlan())
        plans[-1].options = options
        return plans[-1]

    class Pressed(Pressure):
        def applied(self) -> Any:
            self.achieved = 0.42
            return self

        def __enter__(self) -> None:
            SlowedSession.pressed = True

        def __exit__(self, *_: object) -> None:
            SlowedSession.pressed = False

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr("atsc.compiler.commands.under_load.Pressure", Pressed)
    clock = SimpleNamespace(perf_counter=lambda: SlowedSession.now)
    monkeypatch.setattr("atsc.compiler.commands.under_load.time", clock)
    flags = ["--load", "cpu=60", "--load", "cpu=30", "-n", "9", "-d", "6", "--seconds", "0.1"]
    assert cli.main(["bench", str(tmp_path), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan.options["transfer"] for plan in plans] == ["static", "load-aware"]
    rows = found["rows"]
    cases = [(row["policy"], row["load"], row["changes"]) for row in rows]
    assert cases == [
        ("static", "cpu=60", 0),
        ("static", "cpu=30", 0),
        ("load-aware", "cpu=60", 1),
        ("load-aware", "cpu=30", 0),
    ]
    for row in rows:
        without, under = row["without"], row["with"]
        medians = [phase["tpot_median_ms"] for phase in (without, under)]
        assert medians == pytest.approx([2, 6])
        assert row["increase_percent"] == pytest.approx(200)
        assert row["increase_second_half_percent"] == pytest.approx(200)
        assert row["load_achieved_percent"] == 42
        assert under["series_ms"] == pytest.approx([6])
    (change,) = rows[2]["with"]["changes"]
    assert change["at_seconds"] == pytest.approx(0.006) and change["num_promoted"] == 3
    assert SlowedSession.deepest == 6 + 9, "the context goes back to the depth"
    assert cli.main(["bench", str(tmp_path), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith("TPOT of tg9 @ d6, fake, 2 threads, 0.1 s each\n\npolicy ")
    assert "\nload-aware, cpu=60: " in text
    assert cli.main(["bench", str(tmp_path), *flags, "-n", "35"]) == 2
    assert "tg35 @ d6 needs 41 tokens" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built before a test binds itself to one CPU."""
    folder = tmp_path_factory.mktemp("load")
    tiny_model.build_plan(folder / "cpu", rungs=-1)
    tiny_model.build_plan(folder / "virtual", rungs=2)
    return folder


@pytest.mark.toolchain
@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize(
    ("name", "policies"), [("cpu", ["none"]), ("virtual", ["static", "load-aware"])]
)
def test_plans_under_load(
    plans: Path, name: str, policies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plans / name
    flags = ["-n", "4", "--seconds", "0.1", "--threads", "1", "--json"]
    assert cli.main(["bench", str(folder), "--load", "cpu=20", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == policies
    for row in rows:
        assert 0 < row["load_achieved_percent"] < 25
        assert row["with"]["tpot_median_ms"] > 0
