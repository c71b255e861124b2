"""The part of the plan's tables that a GPU needs: kernels and their launches, modules, rungs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atsc.codegen.cuda import CudaKernel
from atsc.passes.ladder import Rung
from atsc.passes.placement import Times


@dataclass(frozen=True, slots=True)
class Module:
    """A file of device code: all kernels of one template for one compute capability."""

    file: str
    """Relative to the plan's folder."""
    template: str
    sm: int
    is_ptx: bool


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """What the tables say of the device; units in the order of the plan's units."""

    kind: str
    """`cuda` or `virtual`."""
    budget_bytes: int
    headroom_bytes: int
    hand_off_ns: int
    link_bytes_per_s: float
    stream_from_rows: int
    kernels: Sequence[tuple[CudaKernel | None, CudaKernel | None]]
    """A node's, for few rows and for many; none for a virtual device."""
    modules: Sequence[Module]
    decode: Sequence[Times]
    prefill: Sequence[Times]
    rungs: Sequence[tuple[Rung, Sequence[bool]]]
    """Ascending: a rung, and a bit for each of the plan's units."""
    promoted: Sequence[tuple[int, ...]] = ()
    """Of each rung, what a decode step copies while the load is as measured; indices of units that
    have a cost."""
    cpu_share: float = 1.0
    """The CPU's speed beside copies to the device."""


def device_declarations(device: DeviceTables | None) -> list[str]:
    """C++ definitions that the node table and `device_entry` refer to."""
    if device is None:
        return []
    index = {template: number for number, template in enumerate(_templates(device))}
    lines = []
    for kernel in _distinct(device):
        lines += _kernel(kernel, index[kernel.template])
    modules = [
        f'    {{"{m.file}", {index[m.template]}, {m.sm}, {"true" if m.is_ptx else "false"}}},'
        for m in device.modules
    ]
    lines += [
        "constexpr ModuleEntry kModules[] = {",
        *(modules or ['    {"", 0, 0, false},']),
        "};",
    ]
    for number, (_, on_device) in enumerate(device.rungs):
        bits = ", ".join(str(int(here)) for here in on_device)
        lines.append(f"constexpr uint8_t kOnDevice{number}[] = {{{bits}}};")
    none = ["    {0, 0, 0, 0, nullptr},"]
    lines += ["constexpr RungEntry kRungs[] = {", *(_rungs(device) or none), "};"]
    return lines


def device_kernels_of(device: DeviceTables | None, node: int) -> str:
    """The two pointers that end a NodeEntry."""
    if device is None or not device.kernels:
        return "nullptr, nullptr"
    return ", ".join(f"&k_{k.symbol}" if k else "nullptr" for k in device.kernels[node])


def device_entry(device: DeviceTables | None) -> str:
    """The DeviceEntry of Plan."""
    if device is None:
        return "{}"
    kind = {"cuda": "kCuda", "virtual": "kVirtual"}[device.kind]
    return (
        f"{{DeviceKind::{kind}, {device.budget_bytes}ull, {device.headroom_bytes}ull, "
        f"{device.hand_off_ns}, {device.link_bytes_per_s!r}, {device.stream_from_rows}, "
        f"{len(device.modules)}, {len(device.rungs)}, kModules, kRungs, "
        f"{device.cpu_share!r}}}"
    )


def unit_times(device: DeviceTables | None, unit: int) -> str:
    """The fields of a UnitEntry that follow its kind."""
    if device is None:
        return "{}, {}, 0"
    decode, prefill = device.decode[unit], device.prefill[unit]
    return (
        f"{{{decode.cpu_ns}, {decode.gpu_ns}}}, {{{prefill.cpu_ns}, {prefill.gpu_ns}}}, "
        f"{decode.transfer_ns}"
    )


def _templates(device: DeviceTables) -> list[str]:
    return sorted({module.template for module in device.modules})


def _distinct(device: DeviceTables) -> list[CudaKernel]:
    found = {kernel.symbol: kernel for pair in device.kernels for kernel in pair if kernel}
    return [found[symbol] for symbol in sorted(found)]


def _kernel(kernel: CudaKernel, module: int) -> list[str]:
    launch = kernel.launch()
    grid = [f"static_cast<uint32_t>({size})" for size in (*launch.grid, "1", "1")][:3]
    names = "[[maybe_unused]] const auto [rows, kv_capacity, num_sms] = shape;"
    return [
        f"constexpr DeviceKernel k_{kernel.symbol} = {{",
        f'    "{kernel.symbol}", {module}, {launch.block}, {launch.shared_bytes},',
        "    [](const LaunchShape& shape, uint32_t grid[3]) {",
        f"      {names}",
        *(f"      grid[{axis}] = {size};" for axis, size in enumerate(grid)),
        "    },",
        "    [](const LaunchShape& shape) {",
        f"      {names}",
        f"      return static_cast<uint64_t>({launch.scratch_bytes});",
        "    }};",
    ]


def _rungs(device: DeviceTables) -> list[str]:
    return [
        f"    {{{rung.required_bytes}ull, {rung.placement.resident_bytes}ull, "
        f"{rung.slot_bytes // max(rung.num_slots, 1)}ull, "
        f"{rung.num_slots}, "
        f"kOnDevice{number}}},"
        for number, (rung, _) in enumerate(device.rungs)
    ]
