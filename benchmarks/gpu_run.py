"""What the steps of gpu.py share: programs run within a budget of time, and their peak VRAM."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).resolve().parents[1] / ".links"
SAMPLE_SECONDS = 0.1
Record = dict[str, Any]


class StepError(Exception):
    """A step failed; the message says why in one line."""


@dataclass(slots=True)
class Clock:
    """When a step, and the whole run, must be over."""

    run_ends: float
    step_ends: float = 0.0

    def left(self) -> float:
        """Seconds that may still be used."""
        return min(self.run_ends, self.step_ends) - time.monotonic()


@dataclass(frozen=True, slots=True)
class Run:
    """What all steps share; `records` of the steps before, by name."""

    args: argparse.Namespace
    clock: Clock
    records: dict[str, Record]
    spare_cores: frozenset[int] = frozenset()
    """That nothing is measured on, for whoever watches; empty: there are none."""

    def command(self, *command: object, watch: PeakVram | None = None) -> str:
        """A program's output.

        Raises:
            StepError: it failed, or took longer than the step may.
        """
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watch.of(process.pid) if watch else contextlib.nullcontext():
            try:
                out, err = process.communicate(timeout=max(self.clock.left(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise StepError(
                    "took longer than its budget; give --scale a larger number"
                ) from None
        if process.returncode:
            last = next(reversed(err.strip().splitlines()), "no message")
            raise StepError(f"exit code {process.returncode}: {last}")
        return out

    def atsc(self, *arguments: object, watch: PeakVram | None = None) -> Any:
        """A command of atsc, as JSON."""
        command = (sys.executable, "-m", "atsc.compiler.cli", *arguments, "--json")
        return json.loads(self.command(*command, watch=watch))

    def folder(self, model: str) -> Path:
        """Where a model and its plan lie."""
        return Path(self.args.work) / model


class PeakVram:
    """The most VRAM of the first GPU that a process held; 0 where NVML is not to be had.

    It asks from other cores than the process's: rounds wait for the slowest of their threads.
    """

    def __init__(self, cores: frozenset[int] = frozenset()) -> None:
        self._cores = cores
        self.process_bytes = self.device_bytes = 0
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
            self._before = pynvml.nvmlDeviceGetMemoryInfo(self._device).used
        except Exception as error:  # no package, no driver, no GPU
            say(f"peak VRAM is not measured: {error}")

    @contextlib.contextmanager
    def of(self, pid: int) -> Iterator[None]:
        """Watch while a process runs."""
        if self._nvml is None:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(pid, over))
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _watch(self, pid: int, over: threading.Event) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # this thread's
        while not over.wait(SAMPLE_SECONDS):
            used = self._nvml.nvmlDeviceGetMemoryInfo(self._device).used
            self.device_bytes = max(self.device_bytes, used - self._before)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                if process.pid == pid and process.usedGpuMemory:
                    self.process_bytes = max(self.process_bytes, process.usedGpuMemory)


def say(text: str) -> None:
    """A line for whoever waits."""
    print(text, file=sys.stderr, flush=True)
