"""What this machine's first CUDA GPU is, asked of the driver; nothing where there is none."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS = 75, 76, 16
"""CUdevice_attribute of the CUDA driver API."""


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """A CUDA device as its driver describes it."""

    model: str
    sm: int
    """Compute capability, 90 for sm_90."""
    num_sms: int
    vram_bytes: int


def detect_gpu() -> FoundGpu | None:
    """The first device that the CUDA driver lists; None without a driver or a device.

    Creates no context, so that it takes no VRAM.
    """
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None

    def attribute(number: int) -> int:
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value if status == 0 else 0

    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return FoundGpu(
        model=name.value.decode(errors="replace"),
        sm=10 * attribute(_CAPABILITY_MAJOR) + attribute(_CAPABILITY_MINOR),
        num_sms=attribute(_MULTIPROCESSORS),
        vram_bytes=total.value,
    )
