"""From one loop nest of TVM to a C function of plain pointers and sizes.

The nest is scheduled (chains inlined, spatial loops fused and the outermost marked parallel) and
lowered without TVM's packed interface. If it is one parallel loop, the function runs a range of it.
TVM's C printer has faults that are mended here: six digits of constants, missing rules for libm,
declarations that no C++ header agrees with.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import PointerType, PrimType
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base.common_schedules import try_inline
from tvm.tirx.buffer import is_buffer_var
from tvm.tirx.build import codegen_build

from atsc.codegen.tail import ELEMENT_BYTES
from atsc.compiler.dims import Dim, largest, product, smallest
from atsc.compiler.errors import CodegenError

_MATH = [
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh",
    "erf", "exp", "exp10", "exp2", "fabs", "floor", "fmod", "hypot", "log", "log10", "log1p",
    "log2", "nearbyint", "pow", "round", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
]  # fmt: skip
_OPAQUE = 8
"""TVM's pattern of nests that declare no reads and writes: inlining into them is unsound."""
_SKIPPED_PASSES = [
    "tirx.AnnotateEntryFunc",
    "tirx.MakePackedAPI",
    "tirx.FP8StorageLegalize",
    "tirx.BF16StorageLegalize",
]
_DECLARATION = re.compile(r'(?:#ifdef __cplusplus\nextern "C"\n#endif\n)?TVM_DLL [^;{]*;\n')
_HEAD = re.compile(r'(?:#ifdef __cplusplus\nextern "C"\n#endif\n)?TVM_DLL (int32_t \w+\()')


@dataclass(frozen=True, slots=True)
class Nest:
    """A C function: int32_t NAME(uint8_t* heap, pointers..., sizes..., [lo, hi])."""

    text: str
    pointers: tuple[str, ...]
    """The element type of each pointer, in C."""
    sizes: tuple[Dim, ...]
    """What its sizes are."""
    grid: Dim | None
    """The extent of its parallel loop, if it is one: it then ends in lo and hi."""
    heap_bytes: Dim


def print_nest(function: Any, name: str, shapes: Sequence[tuple[Dim, ...]], ranged: bool) -> Nest:
    """Schedule, lower and print a loop nest.

    Args:
        function: a PrimFunc whose parameters are buffers.
        name: the C function's.
        shapes: the shape of each buffer.
        ranged: whether the function may run a range of its parallel loop.

    Raises:
        CodegenError: it needs TVM at run time.
    """
    _install_math()
    names = _sizes_by_name(function, shapes)
    scheduled = _schedule(function, ranged)
    raw, grid = _lower(scheduled, name), None
    env = _values(raw, names)
    split = _split_parallel(raw) if ranged else None
    if split is not None:
        raw, grid = split[0], dim_of(split[1], env)
    heap = _heap_bytes(raw, env)
    return Nest(
        _print(raw, name),
        tuple(_c_type(str(p.ty.dtype)) for p in function.params),
        tuple(names[var.name] for var in _free_sizes(scheduled)),
        grid,
        heap,
    )


def dim_of(expression: Any, env: Mapping[str, Dim]) -> Dim:
    """A size in TVM's words as ours.

    Args:
        expression: over variables that `env` has by name.

    Raises:
        CodegenError: it is more than sums, products, quotients, max and min of sizes.
    """
    kind = type(expression).__name__
    if kind == "IntImm":
        return Dim.of(int(expression))
    if kind == "Var" and expression.name in env:
        return env[expression.name]
    if kind == "Cast":
        return dim_of(expression.value, env)
    if kind == "Call" and str(expression.op.name).endswith("shift_right"):
        by = dim_of(expression.args[1], env).constant
        if by is not None:
            return dim_of(expression.args[0], env) // (1 << by)
    rules: dict[str, Callable[[Dim, Dim], Dim]] = {
        "Add": lambda a, b: a + b,
        "Sub": lambda a, b: a - b,
        "Mul": lambda a, b: a * b,
        "FloorDiv": lambda a, b: a // b,
        "Div": lambda a, b: a // b,
        "Max": largest,
        "Min": smallest,
    }
    if kind in rules:
        return rules[kind](dim_of(expression.a, env), dim_of(expression.b, env))
    raise CodegenError(f"TVM computes a size by {kind}, which is no size of ours: {expression}")


def _c_type(dtype: str) -> str:
    plain = {"float32": "float", "float64": "double", "float16": "half", "bool": "bool"}
    return plain.get(dtype, f"{dtype}_t")


def _sizes_by_name(function: Any, shapes: Sequence[tuple[Dim, ...]]) -> dict[str, Dim]:
    """What each size variable of a nest is, from the buffers whose whole size it is somewhere."""
    found: dict[str, Dim] = {}
    if len(function.params) != len(shapes):
        raise CodegenError("TVM's loop nest takes more than its tensors")
    for param, shape in zip(function.params, shapes, strict=True):
        if not is_buffer_var(param):
            raise CodegenError("TVM's loop nest takes more than its tensors")
        for expression, dim in zip(param.ty.shape, shape, strict=True):
            is_size = type(expression).__name__ == "Var"
            if is_size and found.setdefault(expression.name, dim) != dim:
                raise CodegenError(f"two sizes of TVM's loop nest are called {expression.name}")
    missing = [var.name for var in _free_sizes(function) if var.name not in found]
    if missing:
        raise CodegenError(f"nothing tells the size {missing[0]} of TVM's loop nest")
    return found


def _free_sizes(function: Any) -> list[Any]:
    """The variables in the shapes of a nest's buffers, in order of appearance."""
    seen: list[Any] = []
    for param in function.params:
        for size in param.ty.shape:
            for var in tirx.analysis.undefined_vars(tirx.Evaluate(size), []):
                if not any(var.same_as(other) for other in seen):
                    seen.append(var)
    return seen


def _schedule(function: Any, parallel: bool) -> Any:
    """Inline what can be; fuse the spatial loops of each block and mark the outermost parallel."""
    pattern = (function.attrs or {}).get("op_pattern", 0)
    if int(pattern or 0) == _OPAQUE:
        return function
    try:
        schedule = s_tir.Schedule(function)
        blocks = normalize_prim_func(schedule)
        if not blocks:
            return function
        blocks = try_inline(schedule, blocks)
        for block in blocks:
            _schedule_block(schedule, block, parallel and len(blocks) == 1)
        return schedule.mod["main"]
    except (tvm.error.TVMError, s_tir.ScheduleError, ValueError, RuntimeError):
        # Unscheduled loops are slower and as right.
        return function


def _schedule_block(schedule: Any, block: Any, parallel: bool) -> None:
    loops, kinds = schedule.get_loops(block.block_rv), block.dom_kind()
    if len(loops) != len(kinds) or not loops or set(kinds) - {"S", "R"}:
        return
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "S"]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == "R"]
    if spatial and reduced:
        schedule.reorder(*spatial, *reduced)
    if reduced:
        outer = schedule.fuse(*spatial) if len(spatial) > 1 else spatial[0] if spatial else None
        if outer is not None and parallel:
            schedule.parallel(outer)
        rest = schedule.get_loops(block.block_rv)
        schedule.decompose_reduction(block.block_rv, rest[-len(reduced)])
    elif parallel and spatial:
        # The innermost stays a plain loop, which the C++ compiler vectorises.
        outer = schedule.fuse(*spatial[:-1]) if len(spatial) > 2 else spatial[0]
        schedule.parallel(outer)


def _lower(function: Any, name: str) -> Any:
    """To a function of pointers and sizes that returns an int32."""
    target = tvm.target.Target({"kind": "c"})
    marked = function.with_attr("global_symbol", name).with_attr("target", target)
    pipeline, _, _ = tvm.tirx.get_tir_pipeline("default")
    with target, tvm.transform.PassContext(opt_level=3, disabled_pass=_SKIPPED_PASSES):
        module = pipeline(tvm.IRModule({name: marked}))
        ((_, lowered),) = module.functions_items()
    return _with_pointers(lowered, name)


def _with_pointers(function: Any, name: str) -> Any:
    params, declared, bound = [], [], set()
    for buffer in function.params:
        pointer = tirx.Var(f"{buffer.name}_ptr", PointerType(buffer.ty.dtype, "global"))
        params.append(pointer)
        offset, strides = buffer.ty.elem_offset, list(buffer.ty.strides or [])
        compact = [(offset, tirx.IntImm("int64", 0))] + [
            (stride, _size_behind(buffer, axis)) for axis, stride in enumerate(strides)
        ]
        for variable, value in compact:
            if type(variable).__name__ == "Var" and hash(variable) not in bound:
                bound.add(hash(variable))
                declared.append(tirx.stmt.Bind(variable, value.astype(str(variable.ty))))
        declared.append(tirx.DeclBuffer(buffer, data=pointer))
    params += _free_sizes(function)
    body = tirx.SeqStmt([*declared, function.body])
    body = tirx.AttrStmt("default", "device_id", tirx.IntImm("int32", 0), body)
    body = tirx.AttrStmt("default", "device_type", tirx.IntImm("int32", 1), body)
    body = tirx.SeqStmt([body, tirx.stmt.Return(tirx.IntImm("int32", 0))])
    raw = tirx.PrimFunc(params, body, ret_type=PrimType("int32"))
    for key, value in function.attrs.items() if function.attrs is not None else ():
        raw = raw.with_attr(key, value)
    return raw.with_attr("global_symbol", name).with_attr("tirx.noalias", True)


def _size_behind(buffer: Any, axis: int) -> Any:
    size = tirx.IntImm("int64", 1)
    for extent in list(buffer.ty.shape)[axis + 1 :]:
        size = size * extent.astype("int64")
    return size


def _values(function: Any, sizes: Mapping[str, Dim]) -> dict[str, Dim]:
    """Sizes, and every variable that the function binds to an expression of them."""
    env = dict(sizes)

    def visit(node: Any) -> None:
        # What is no size is an index.
        with contextlib.suppress(CodegenError):
            env.setdefault(node.var.name, dim_of(node.value, env))

    tvm_ffi.structural_walk(function.body, (tirx.stmt.Bind, visit), order="pre")
    return env


def _split_parallel(function: Any) -> tuple[Any, Any] | None:
    """Turn the one parallel loop into a range [lo_, hi_) and give its extent.

    None where there is other work beside that loop: ranges would repeat it.
    """
    loops: list[Any] = []

    def visit(statement: Any) -> bool:
        if isinstance(statement, tirx.SeqStmt):
            return all(visit(part) for part in statement.seq)
        if isinstance(statement, tirx.AttrStmt):
            return visit(statement.body)
        if isinstance(statement, tirx.For) and int(statement.kind) == 1:
            loops.append(statement)
            return True
        harmless = (tirx.stmt.Bind, tirx.DeclBuffer, tirx.stmt.Return, tirx.Evaluate)
        return isinstance(statement, harmless)

    if not visit(function.body) or len(loops) != 1:
        return None
    loop = loops[0]
    lo, hi = (tirx.Var(name, loop.loop_var.ty) for name in ("lo_", "hi_"))
    ranged = tirx.For(loop.loop_var, lo, hi - lo, tirx.ForKind.SERIAL, loop.body)

    def replace(statement: Any) -> Any:
        if statement.same_as(loop):
            return ranged
        if isinstance(statement, tirx.SeqStmt):
            return tirx.SeqStmt([replace(part) for part in statement.seq])
        if isinstance(statement, tirx.AttrStmt):
            body = replace(statement.body)
            return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, body)
        return statement

    params = [*function.params, lo, hi]
    split = tirx.PrimFunc(params, replace(function.body), ret_type=function.ret_type)
    for key, value in function.attrs.items():
        split = split.with_attr(key, value)
    return split, loop.extent


def _heap_bytes(function: Any, env: Mapping[str, Dim]) -> Dim:
    """What all its scratch buffers need, each once: it frees one before it repeats it."""
    total = [Dim.of(0)]

    def visit(node: Any) -> None:
        kind = node.buffer.ty
        elements = product(dim_of(size, env) for size in kind.shape)
        total[0] += elements * ELEMENT_BYTES[str(kind.dtype)] + 64  # type: ignore[index]

    tvm_ffi.structural_walk(function.body, (tirx.stmt.AllocBuffer, visit))
    return total[0]


def _print(function: Any, name: str) -> str:
    target = tvm.target.Target({"kind": "c"})
    _, finish, _ = tvm.tirx.get_tir_pipeline("default")
    with target:
        module = tvm.IRModule({name: function})
        module = tirx.transform.FP8StorageLegalize()(module)
        module = tirx.transform.BF16StorageLegalize()(module)
        module = finish()(module)
        exact = {var.name_hint: _exact_floats(f) for var, f in module.functions_items()}
        source = str(codegen_build(tvm.IRModule(exact), target).inspect_source())
    start = source.index("TVM_DLL int32_t")
    text = _DECLARATION.sub("", source[start:])
    if "TVMFFI" in text:
        raise CodegenError("TVM leaves a part of it to its run-time library")
    text = _HEAD.sub(lambda head: f"{head[1]}uint8_t* heap_, ", text)
    return f"{text.strip()}\n"


def _exact_floats(function: Any) -> Any:
    """Constants by their bits: the printer writes six digits, and inf and nan as nothing in C."""

    def replace(constant: Any) -> Any:
        kind = str(constant.ty)
        value = float(constant.value)
        if kind == "float32":
            try:
                bits = struct.unpack("I", struct.pack("f", value))[0]
            except OverflowError:
                bits = 0x7F800000 if value > 0 else 0xFF800000
            return tirx.call_pure_extern(kind, "f32b_", tirx.IntImm("uint32", bits))
        if kind == "float64":
            bits = struct.unpack("q", struct.pack("d", value))[0]
            return tirx.call_pure_extern(kind, "f64b_", tirx.IntImm("int64", bits))
        return constant

    body = tvm_ffi.structural_map(function.body, (tirx.FloatImm, replace), order="post")
    return function.with_body(body)


def _install_math() -> None:
    """Rules for the functions of libm, which the C target lacks in part."""
    if _installed:
        return
    _installed.append(True)
    for name in _MATH:

        def rule(call: Any, name: str = name) -> Any:
            kind = str(call.ty)
            if kind not in ("float32", "float64"):
                raise CodegenError(f"{name} of {kind}")
            c_name = name if kind == "float64" else f"{name}f"
            return tirx.call_pure_extern(call.ty, c_name, *call.args)

        tirx.op.register_intrin_lowering(f"tirx.{name}", target="c", f=rule, level=99)


_installed: list[bool] = []
