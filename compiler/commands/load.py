"""External pressure on a machine, for `atsc bench --load`: busy CPUs, or a busy GPU and link.

The pressure comes from processes of their own (this module run with -m), one for each CPU or one
for the GPU. A process works for its share of every 10 ms, as it would take alone, and sleeps for
the rest; beside others it gets at most what the system gives it, and says at the end how much that
was. What presses the GPU runs on CPUs that this process is not bound to, if there are any. It ends
when its standard input does, so whatever happens to the parent.

Source: ATSInfer section 5.3 (60 % external CPU load, 60 % external GPU and PCIe load).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atsc.compiler.errors import AtscError, DeviceError

PERIOD_SECONDS = 0.01
"""Shorter than a decode step of a large model, so that all steps meet the same pressure."""
START_SECONDS = 60.0
END_SECONDS = 10.0
KERNEL_SECONDS = 0.0005
CALIBRATION_SECONDS = 0.02
CALIBRATIONS = 10
BUFFER_BYTES = 128 << 20
"""More than a GPU's L2 holds: kernels press its memory."""
NUM_ITEMS = BUFFER_BYTES // 16
COPY_BYTES = 16 << 20
BLOCK = 256
BLOCKS_PER_SM = 8
KERNEL = """
extern "C" __global__ void press(const float4* data, unsigned num_items, unsigned steps) {
  const unsigned stride = gridDim.x * blockDim.x;
  unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) % num_items;
  float sum = 0;
  for (unsigned step = 0; step < steps; ++step) {
    const float4 item = data[at];
    sum = fmaf(item.x, item.y, fmaf(item.z, item.w, sum));
    at += stride;
    if (at >= num_items) at -= num_items;
  }
  if (sum == 1.5f) const_cast<float4*>(data)->x = sum; /* never: keeps the loop */
}
"""
Work = Callable[[float, float], float]
"""Works for so many seconds, or until a moment of the monotonic clock; the seconds worked."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is pressed, and for which share of the time."""

    kind: str
    """`cpu` or `gpu`."""
    share: float
    """Above 0, at most 1."""

    def __str__(self) -> str:
        return f"{self.kind}={100 * self.share:g}"


def parse_load(text: str) -> Load:
    """The load of `cpu=60`.

    Raises:
        argparse.ArgumentTypeError: not such a thing.
    """
    match = re.fullmatch(r"(cpu|gpu)=(\d+(?:\.\d+)?)%?", text.strip())
    if not match or not 0 < float(match[2]) <= 100:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no load; write cpu=60 or gpu=60, a share of the time in per cent"
        )
    return Load(match[1], float(match[2]) / 100)


def check_loads(loads: Sequence[Load]) -> None:
    """Refuse what this machine cannot do, before anything is measured.

    Raises:
        DeviceError: the GPU, its driver, or packages for it are missing.
        CodegenError: there is no compiler for its kernel.
    """
    if any(load.kind == "gpu" for load in loads):
        from atsc.codegen.nvrtc import find_cuda_compiler

        if not _call(_driver(), "cuDeviceGetCount"):
            raise DeviceError("--load gpu=...: there is no NVIDIA GPU; use --load cpu=...")
        find_cuda_compiler()


class Pressure:
    """Processes that press this machine while the context lasts; each time as much."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.achieved = 0.0
        """After the context: the share that the processes really got, on average."""
        self._rates: list[float] = []
        """GpuRates, from the first time on."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Start it, wait until it presses, and end it.

        Raises:
            DeviceError: it did not start, or ended too early.
        """
        cpus = sorted(os.sched_getaffinity(0)) if self.load.kind == "cpu" else [-1]
        with contextlib.ExitStack() as stack:
            children = [stack.enter_context(_child(self.load, cpu, self._rates)) for cpu in cpus]
            for child in children:
                self._rates = self._answer(child, START_SECONDS)["rates"]
            yield
            for child in children:
                assert child.stdin
                child.stdin.close()
            shares = [self._answer(child, END_SECONDS)["share"] for child in children]
            self.achieved = sum(shares) / len(shares)

    def _answer(self, child: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """A child's next line."""
        assert child.stdout
        if not select.select([child.stdout], [], [], seconds)[0]:
            raise DeviceError(f"--load {self.load}: its process has not answered for {seconds:g} s")
        line = child.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in found:
            raise DeviceError(f"--load {self.load}: {found['error']}")
        return found


@contextlib.contextmanager
def _child(load: Load, cpu: int, rates: Sequence[float]) -> Iterator[subprocess.Popen[bytes]]:
    numbers = map(str, (load.share, cpu, *rates))
    command = [sys.executable, "-m", __name__, load.kind, *numbers]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is the parent's
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe
            pipe.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The child: press until standard input ends."""
    kind, share, cpu, *numbers = sys.argv[1:] if arguments is None else arguments
    rates = GpuRates(*map(float, numbers)) if numbers else None
    try:
        if kind == "gpu":
            _leave_cpus()
            work, rates = gpu_work(_driver(), rates)
        else:
            work = _cpu_work(int(cpu))
        _say({"rates": list(rates or ())})
        _say({"share": press(float(share), work, sys.stdin)})
    except AtscError as error:
        _say({"error": str(error)})
        return 1
    return 0


def _say(line: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        print(json.dumps(line), flush=True)


def press(share: float, work: Work, stop: Any) -> float:
    """Work for a share of every period until there is something to read; the share achieved."""
    begin, worked = time.monotonic(), 0.0
    while True:
        end = time.monotonic() + PERIOD_SECONDS
        worked += work(share * PERIOD_SECONDS, end)
        if select.select([stop], [], [], max(end - time.monotonic(), 0))[0]:
            return worked / (max(end, time.monotonic()) - begin)  # of whole periods


def _leave_cpus() -> None:
    """Go to other CPUs than those that this process has from its parent, if there are any."""
    others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # not this process's to use
        os.sched_setaffinity(0, others)  # none: refused


def _cpu_work(cpu: int) -> Work:
    """Spins on one CPU; what counts is the time that it gets there."""
    with contextlib.suppress(OSError):  # taken off line meanwhile
        os.sched_setaffinity(0, [cpu])

    def work(seconds: float, until: float) -> float:
        begin = time.thread_time()
        while (worked := time.thread_time() - begin) < seconds and time.monotonic() < until:
            pass
        return worked

    return work


class GpuRates(NamedTuple):
    """What a GPU does in a second while nobody else has it."""

    steps: float
    """Of KERNEL."""
    copied_bytes: float
    """To it."""


def gpu_work(driver: Any, rates: GpuRates | None = None) -> tuple[Work, GpuRates]:
    """Kernels that read VRAM, and copies to it beside them, both as long as they take alone.

    Args:
        driver: the module cuda.bindings.driver; the first GPU is used.
        rates: None: measured.

    Raises:
        DeviceError, CodegenError: something of it is not to be had.
    """
    from atsc.codegen.nvrtc import CudaUnit, compile_cuda

    device = _call(driver, "cuDeviceGet", 0)
    sleeping = int(driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC)  # the CPU is not what is pressed
    _call(driver, "cuDevicePrimaryCtxSetFlags", device, sleeping)
    _call(driver, "cuCtxSetCurrent", _call(driver, "cuDevicePrimaryCtxRetain", device))

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", kind, device))

    major, minor = (attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    (binary,) = compile_cuda([CudaUnit("pressure", KERNEL, 10 * major + minor)])
    image = ctypes.create_string_buffer(binary.read_bytes())
    module = _call(driver, "cuModuleLoadData", ctypes.addressof(image))
    function = _call(driver, "cuModuleGetFunction", module, b"press")
    num_blocks = BLOCKS_PER_SM * attribute("MULTIPROCESSOR_COUNT")
    streams = [
        _call(driver, "cuStreamCreate", int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        for _ in range(2)
    ]
    data = int(_call(driver, "cuMemAlloc", BUFFER_BYTES))
    _call(driver, "cuMemsetD8", data, 0, BUFFER_BYTES)
    target = int(_call(driver, "cuMemAlloc", COPY_BYTES))
    pinned = int(_call(driver, "cuMemHostAlloc", COPY_BYTES, 0))

    def launch(steps: int) -> None:
        numbers = (ctypes.c_uint64(data), ctypes.c_uint32(NUM_ITEMS), ctypes.c_uint32(steps))
        pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, numbers))
        size = (num_blocks, 1, 1, BLOCK, 1, 1)
        parameters = ctypes.addressof(pointers)
        _call(driver, "cuLaunchKernel", function, *size, 0, streams[0], parameters, 0)

    def copy(num_bytes: int) -> None:
        for begin in range(0, num_bytes, COPY_BYTES):
            part = min(COPY_BYTES, num_bytes - begin)
            _call(driver, "cuMemcpyHtoDAsync", target, pinned, part, streams[1])

    def wait() -> None:
        for stream in streams:
            _call(driver, "cuStreamSynchronize", stream)

    found = rates or GpuRates(_rate_of(launch, wait, 256), _rate_of(copy, wait, COPY_BYTES))

    def work(seconds: float, until: float) -> float:
        count = math.ceil(seconds / KERNEL_SECONDS)
        for _ in range(count):
            launch(max(round(found.steps * seconds / count), 1))
        copy(round(found.copied_bytes * seconds))
        wait()
        return seconds

    return work, found


def _rate_of(work: Callable[[int], None], wait: Callable[[], None], amount: int) -> float:
    """Amount a second, the best of some pieces of work that last long enough to be timed."""

    def seconds_of(amount: int) -> float:
        begin = time.perf_counter()
        work(amount)
        wait()
        return time.perf_counter() - begin

    seconds_of(amount)  # it also loads what it needs
    while seconds_of(amount) < CALIBRATION_SECONDS and amount < 1 << 30:
        amount *= 2
    # An idle GPU's clocks need some of them to rise: else no two loads would be the same.
    return amount / min(seconds_of(amount) for _ in range(CALIBRATIONS))


def _driver() -> Any:
    """The driver's bindings, ready to use.

    Raises:
        DeviceError: the package or the driver is missing.
    """
    try:
        from cuda.bindings import driver

        _call(driver, "cuInit", 0)
        return driver
    except ImportError:
        raise DeviceError('--load gpu=... needs cuda-bindings; pip install "atsc[cuda]"') from None
    except RuntimeError as error:
        raise DeviceError(f"--load gpu=... needs an NVIDIA GPU and its driver: {error}") from None


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """A driver function's value; its error as DeviceError."""
    result, *values = getattr(driver, name)(*arguments)
    if int(result) != 0:
        raise DeviceError(f"pressing the GPU: {name} answers {result.name}")
    return values[0] if values else None


if __name__ == "__main__":
    sys.exit(main())
