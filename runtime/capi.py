"""The C interface of a plan's library (include/atsc.h) in ctypes, and loading that library."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

from atsc.compiler.errors import (
    AtscError,
    CancelledError,
    DeviceError,
    PlanError,
    UsageError,
)
from atsc.compiler.plan import API_VERSION

MESSAGE_BYTES, REASON_BYTES = 1024, 128
MAX_RANK = 8

WEIGHTS_MAP, WEIGHTS_READ = 0, 1
TRANSFERS = ("load-aware", "static", "none")
ROUNDS = ("graph", "launches", "synchronous")
ROUND_KINDS = ("decode", "prefill")
LOGITS_LAST, LOGITS_NONE, LOGITS_ALL, LOGITS_ROWS = range(4)
TRACKS = ("cpu", "cpu wait", "device", "device wait", "copy")
FINISH_NONE, FINISH_STOP, FINISH_CONTEXT = range(3)

_ERRORS: dict[int, type[AtscError]] = {
    1: UsageError,
    2: UsageError,
    3: CancelledError,
    4: PlanError,
    5: DeviceError,
    6: AtscError,
    7: AtscError,
}

Handle = ctypes.c_void_p
Int32Pointer = ctypes.POINTER(ctypes.c_int32)
Int64Pointer = ctypes.POINTER(ctypes.c_int64)
FloatPointer = ctypes.POINTER(ctypes.c_float)


class _Sized(ctypes.Structure):
    """A struct of atsc.h: `struct_size` first, everything else zero unless given."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.struct_size = ctypes.sizeof(self)


class Message(_Sized):
    """atsc_message."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("text", ctypes.c_char * MESSAGE_BYTES))


class VirtualDevice(_Sized):
    """atsc_virtual_device."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("occupied_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("limits_pinning", ctypes.c_int32),
        ("pinnable_bytes", ctypes.c_uint64),
        ("no_graphs", ctypes.c_int32),
        ("link_bytes_per_s", ctypes.c_double),
    )


class PlanOptions(_Sized):
    """atsc_plan_options."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("weights_path", ctypes.c_char_p),
        ("num_threads", ctypes.c_int32),
        ("weights_mode", ctypes.c_int32),
        ("verify", ctypes.c_int32),
        ("max_sessions", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
        ("vram_bytes", ctypes.c_uint64),
        ("no_device", ctypes.c_int32),
        ("device_ordinal", ctypes.c_int32),
        ("strict", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("on_device", ctypes.c_char_p),
        ("virtual_device", ctypes.POINTER(VirtualDevice)),
        ("transfer", ctypes.c_int32),
        ("drift_threshold", ctypes.c_double),
        ("reschedule_interval", ctypes.c_double),
        ("rounds", ctypes.c_int32),
        ("yield_gpu", ctypes.c_int32),
    )


class PlanInfo(_Sized):
    """atsc_plan_info."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("model_name", ctypes.c_char_p),
        ("plan_id", ctypes.c_char_p),
        ("vocab_size", ctypes.c_int32),
        ("context_length", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("max_logit_rows", ctypes.c_int32),
        ("bos_token_id", ctypes.c_int32),
        ("num_eos_token_ids", ctypes.c_int32),
        ("eos_token_ids", Int32Pointer),
        ("num_threads", ctypes.c_int32),
        ("max_sessions", ctypes.c_int32),
        ("isa", ctypes.c_char_p),
        ("weights_bytes", ctypes.c_uint64),
        ("cache_bytes", ctypes.c_uint64),
        ("num_units", ctypes.c_int32),
        ("num_placements", ctypes.c_int32),
        ("placement", ctypes.c_int32),
        ("predicted_device_bytes", ctypes.c_uint64),
        ("device_bytes", ctypes.c_uint64),
        ("device_name", ctypes.c_char_p),
        ("notice", ctypes.c_char_p),
    )


class UnitProfile(_Sized):
    """atsc_unit_profile."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("unit", ctypes.c_int32),
        ("on_device", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("ns", ctypes.c_int64),
    )


class LinkProfile(_Sized):
    """atsc_link_profile."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("to_device_bytes_per_s", ctypes.c_double),
        ("to_host_bytes_per_s", ctypes.c_double),
        ("hand_off_to_device_ns", ctypes.c_double),
        ("hand_off_to_host_ns", ctypes.c_double),
        ("to_device_beside_cpu_bytes_per_s", ctypes.c_double),
        ("cpu_slowdown", ctypes.c_double),
        ("fixed_device_bytes", ctypes.c_uint64),
    )


class Prefill(_Sized):
    """atsc_prefill."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("tokens", Int32Pointer),
        ("num_tokens", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("logits", ctypes.c_int32),
        ("rows", Int64Pointer),
        ("num_rows", ctypes.c_int64),
        ("out", FloatPointer),
        ("out_floats", ctypes.c_int64),
    )


class Sampling(_Sized):
    """atsc_sampling."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("ignore_eos", ctypes.c_int32),
        ("has_seed", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("stop_token_ids", Int32Pointer),
        ("num_stop_token_ids", ctypes.c_int32),
    )


class Next(_Sized):
    """atsc_next."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("token", ctypes.c_int32),
        ("finish", ctypes.c_int32),
    )


class Event(ctypes.Structure):
    """atsc_event."""

    _fields_ = (
        ("track", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("begin_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("first_node", ctypes.c_char_p),
        ("last_node", ctypes.c_char_p),
    )


class Round(_Sized):
    """atsc_round."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("position", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_logit_rows", ctypes.c_int64),
        ("begin_ns", ctypes.c_int64),
        ("end_ns", ctypes.c_int64),
        ("num_events", ctypes.c_int64),
        ("events", ctypes.POINTER(Event)),
    )


class Change(_Sized):
    """atsc_change."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("when_ns", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("num_promoted", ctypes.c_int32),
        ("promoted_bytes", ctypes.c_uint64),
        ("before_ns", ctypes.c_int64),
        ("after_ns", ctypes.c_int64),
        ("adoption_ns", ctypes.c_int64),
        ("build_ns", ctypes.c_int64),
        ("reason", ctypes.c_char * REASON_BYTES),
        ("num_retreated", ctypes.c_int32),
        ("host_bytes", ctypes.c_uint64),
    )


class Tensor(_Sized):
    """atsc_tensor."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    )


class GraphInfo(_Sized):
    """atsc_graph_info."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("input_names", ctypes.POINTER(ctypes.c_char_p)),
        ("output_names", ctypes.POINTER(ctypes.c_char_p)),
    )


# Function -> its parameters before the message, in the order of atsc_api.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "plan_open": (ctypes.POINTER(PlanOptions), ctypes.POINTER(Handle)),
    "plan_close": (Handle,),
    "plan_get_info": (Handle, ctypes.POINTER(PlanInfo)),
    "session_create": (Handle, ctypes.POINTER(Handle)),
    "session_destroy": (Handle,),
    "session_get_position": (Handle, Int64Pointer),
    "session_prefill": (Handle, ctypes.POINTER(Prefill)),
    "session_decode": (Handle, ctypes.c_int32, FloatPointer),
    "session_logits": (Handle, ctypes.POINTER(FloatPointer), Int64Pointer),
    "session_set_sampling": (Handle, ctypes.POINTER(Sampling)),
    "session_next": (Handle, ctypes.POINTER(Next)),
    "session_rewind": (Handle, ctypes.c_int64),
    "session_cancel": (Handle,),
    "session_save": (Handle, ctypes.c_char_p),
    "session_restore": (Handle, ctypes.c_char_p),
    "plan_profile_unit": (Handle, ctypes.POINTER(UnitProfile)),
    "plan_profile_link": (Handle, ctypes.POINTER(LinkProfile)),
    "plan_script_device": (Handle, ctypes.c_char_p, ctypes.c_double),
    "plan_get_events": (Handle, ctypes.POINTER(Event), ctypes.c_int64, Int64Pointer),
    "session_set_recording": (Handle, ctypes.c_int32),
    "session_take_round": (Handle, ctypes.POINTER(Round)),
    "plan_take_change": (Handle, ctypes.POINTER(Change)),
    "plan_get_graph": (Handle, ctypes.POINTER(GraphInfo)),
    "plan_run": (
        *(Handle, ctypes.POINTER(Tensor), ctypes.c_int32),
        *(ctypes.POINTER(Tensor), ctypes.c_int32),
    ),
}


class _Table(ctypes.Structure):
    """atsc_api."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", ctypes.c_uint32),
        *(
            (name, ctypes.CFUNCTYPE(ctypes.c_int32, *parameters, ctypes.POINTER(Message)))
            for name, parameters in _FUNCTIONS.items()
        ),
    )


class Library:
    """A plan's library in memory; its functions are called by name through `call`."""

    def __init__(self, content: bytes, name: str) -> None:
        """Load the very bytes given, which the caller has checked.

        Raises:
            PlanError: the system cannot load them, or they are no plan's library.
        """
        self._file = _memory_file(content)
        try:
            self._library = ctypes.CDLL(self._path(), mode=os.RTLD_LOCAL)
        except OSError as error:
            os.close(self._file)
            raise PlanError(
                f"{name}: cannot be loaded ({error}); compile the model again"
            ) from None
        try:
            get_api = self._library.atsc_get_api
        except AttributeError:
            self.close()
            raise PlanError(f"{name}: no plan's library; compile the model again") from None
        get_api.restype, get_api.argtypes = ctypes.POINTER(_Table), (ctypes.c_uint32,)
        table = get_api(API_VERSION)
        if not table:
            self.close()
            raise PlanError(
                f"{name}: made by another version of atsc (it has no C interface {API_VERSION}); "
                "compile the model again"
            )
        self._functions: dict[str, Callable[..., int]] = {
            function: getattr(table.contents, function) for function in _FUNCTIONS
        }

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the table.

        Raises:
            AtscError: a child that fits the status, with the library's message.
        """
        message = Message()
        status = self._functions[function](*arguments, ctypes.byref(message))
        if status:
            text = message.text.decode("utf-8", "replace")
            raise _ERRORS.get(status, AtscError)(text or f"{function} failed with status {status}")

    def _path(self) -> str:
        return f"/proc/self/fd/{self._file}"

    def close(self) -> None:
        """Unload; nothing of the library may be in use."""
        self._functions = {}
        _ctypes.dlclose(self._library._handle)
        # The system tells libraries apart by name, and a closed descriptor's number comes again: if
        # it keeps this library, the descriptor stays open.
        try:
            kept = ctypes.CDLL(self._path(), mode=os.RTLD_NOLOAD)
        except OSError:
            os.close(self._file)
        else:
            _ctypes.dlclose(kept._handle)


def _memory_file(content: bytes) -> int:
    """A file in memory that may be executed; its descriptor."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("libplan.so", flags | 0x10)  # MFD_EXEC, Linux 6.3
    except OSError:
        try:
            descriptor = os.memfd_create("libplan.so", flags)
        except OSError as error:
            raise DeviceError(f"cannot create a file in memory: {error.strerror}") from None
    with _closed_on_failure(descriptor):
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    return descriptor


@contextlib.contextmanager
def _closed_on_failure(descriptor: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        os.close(descriptor)
        raise DeviceError(f"no memory for the plan's library: {error.strerror}") from None
