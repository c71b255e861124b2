"""From a model of one ONNX node to C++ through TVM.

TVM's front end turns the node into loop nests, one or several (tvm_nest.py prints each as a C
function). One nest becomes a kernel over a range of its outermost loop; several become one kernel
that runs them in turn, with what lies between them in its workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from atsc.codegen.tail import ELEMENT_BYTES
from atsc.codegen.tvm_nest import dim_of, print_nest
from atsc.codegen.tvm_request import Answer, Request
from atsc.compiler.dims import Dim, product
from atsc.compiler.errors import CodegenError

_FLOAT16 = TensorProto.FLOAT16
_MOST_CONSTANT_BYTES = 64 << 10
_PRELUDE = """\
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using half = _Float16;
[[maybe_unused]] inline float f32b_(uint32_t bits) { return std::bit_cast<float>(bits); }
[[maybe_unused]] inline double f64b_(uint64_t bits) { return std::bit_cast<double>(bits); }
[[maybe_unused]] inline void* allocate_(uint8_t*& heap, int64_t bytes) {
  void* start = heap;
  heap += (bytes + 63) & ~int64_t{63};
  return start;
}
[[maybe_unused]] inline int32_t free_(uint8_t*& heap, void* start) {
  if (start < heap) heap = static_cast<uint8_t*>(start);
  return 0;
}
#define TVMBackendAllocWorkspace(device, index, bytes, code, bits) allocate_(heap_, bytes)
#define TVMBackendFreeWorkspace(device, index, start) free_(heap_, start)

"""


@dataclass(slots=True)
class _Program:
    """What is gathered while the main function is walked."""

    request: Request
    env: dict[str, Dim]
    """The sizes of the model by their names in it."""
    functions: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    places: dict[Any, str] = field(default_factory=dict)
    """The address of each tensor of the main function, in C."""
    workspace: Dim = field(default_factory=lambda: Dim.of(0))
    grid: Dim = field(default_factory=lambda: Dim.of(1))

    def c(self, dim: Dim) -> str:
        """A size in C."""
        return dim.c({name: f"dims[{i}]" for i, name in enumerate(self.request.symbols)})

    def reserve(self, num_bytes: Dim) -> str:
        """Room in the workspace, 64-byte aligned; its address in C."""
        start = f"static_cast<uint8_t*>(workspace) + {self.c(self.workspace)}"
        self.workspace = self.workspace + (num_bytes + 63) // 64 * 64
        return start


def lower(request: Request) -> Answer:
    """The kernel of a node, not yet checked.

    Raises:
        CodegenError: TVM has no rule for the node, or what it made needs TVM at run time.
    """
    module = _optimise(from_onnx(_in_float32(request.model), keep_params_in_input=False))
    program = _Program(request, {f"d{i}": dim for i, dim in enumerate(request.sizes)})
    main = module["main"]
    bindings = [b for block in main.body.blocks for b in block.bindings]
    values = {binding.var: binding.value for binding in bindings}
    results = _results(main.body.body, values)
    _place_ends(program, main, results, values)
    calls = [binding for binding in bindings if _is_loop_nest(binding.value)]
    for binding in bindings:
        if _is_loop_nest(binding.value):
            _add_nest(program, module, binding, len(calls) == 1)
        elif not isinstance(binding.value, relax.Tuple | relax.Var | relax.TupleGetItem):
            what = getattr(getattr(binding.value, "op", None), "name", type(binding.value).__name__)
            raise CodegenError(f"TVM leaves {what} to its run-time library")
    _copy_results(program, results)
    return Answer(_source(program), program.grid, program.workspace)


def _in_float32(text: bytes) -> onnx.ModelProto:
    """Half precision computed in single precision, which the C generator has functions for."""
    model = onnx.load_from_string(text)
    graph, node = model.graph, onnx.NodeProto()
    node.CopyFrom(model.graph.node[0])
    if node.op_type in ("Cast", "CastLike"):
        return model
    before, after = [], []
    for value in graph.input:
        if value.type.tensor_type.elem_type == _FLOAT16:
            wide = f"{value.name}_wide"
            before.append(helper.make_node("Cast", [value.name], [wide], to=TensorProto.FLOAT))
            node.input[list(node.input).index(value.name)] = wide
    for fixed in graph.initializer:
        if fixed.data_type == _FLOAT16:
            array = numpy_helper.to_array(fixed).astype("float32")
            fixed.CopyFrom(numpy_helper.from_array(array, fixed.name))
    for index, value in enumerate(graph.output):
        if value.type.tensor_type.elem_type == _FLOAT16:
            node.output[index] = f"{value.name}_wide"
            after.append(helper.make_node("Cast", [node.output[index]], [value.name], to=_FLOAT16))
    del graph.node[:]
    graph.node.extend([*before, node, *after])
    return model


def _optimise(module: Any) -> Any:
    """To calls of fused loop nests."""
    steps = relax.transform
    passes = [
        relax.backend.DispatchSortScan(),
        steps.DecomposeOpsForInference(),
        steps.CanonicalizeBindings(),
        steps.LegalizeOps(),
        steps.AnnotateTIROpPattern(),
        steps.FuseOps(),
        steps.FuseTIR(),
        steps.DeadCodeElimination(["main"]),
    ]
    with tvm.target.Target({"kind": "c"}):
        return tvm.ir.transform.Sequential(passes)(module)


def _is_loop_nest(value: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.call_tir"


def _results(body: Any, values: Mapping[Any, Any]) -> list[Any]:
    """The values that the main function gives, each as what makes it."""
    body = _origin(body, values)
    made = values.get(body, body)
    if isinstance(made, relax.Tuple):
        return [_origin(item, values) for item in made.fields]
    return [body]


def _origin(value: Any, values: Mapping[Any, Any]) -> Any:
    while isinstance(value, relax.Var) and isinstance(values.get(value), relax.Var):
        value = values[value]
    return value


def _place_ends(
    program: _Program, main: Any, results: list[Any], values: Mapping[Any, Any]
) -> None:
    """Inputs lie in the first tensors; a result is written to its own, if it is made here."""
    count = len(program.request.inputs)
    if len(main.params) != count or len(results) != len(program.request.outputs):
        raise CodegenError("TVM's function has other inputs or outputs than the node")
    places = {param: f"tensors[{index}]" for index, param in enumerate(main.params)}
    for index, result in enumerate(results):
        if isinstance(result, relax.Var):
            places.setdefault(result, f"tensors[{count + index}]")
    program.places = places
    for var, value in values.items():
        if isinstance(value, relax.TupleGetItem) and var in places:
            # A nest with several results writes each to where its item is wanted.
            places[(value.tuple_value, int(value.index))] = places[var]


def _address(program: _Program, value: Any) -> str:
    if isinstance(value, tvm.ir.GenericConst):
        data = value.value.numpy()
        if data.nbytes > _MOST_CONSTANT_BYTES:
            raise CodegenError(f"a constant of {data.nbytes} bytes would be part of the source")
        name = f"constant{len(program.functions)}"
        content = ",".join(map(str, data.tobytes())) or "0"
        program.functions.append(f"alignas(64) const uint8_t {name}[] = {{{content}}};\n")
        return f"const_cast<uint8_t*>({name})"
    if value not in program.places:
        raise CodegenError("TVM's function uses a value that no loop nest makes")
    return program.places[value]


def _shape(program: _Program, kind: Any) -> tuple[Dim, ...]:
    return tuple(dim_of(size, program.env) for size in kind.shape)


def _add_nest(program: _Program, module: Any, binding: Any, alone: bool) -> None:
    call = binding.value
    if len(call.args) > 2:
        raise CodegenError("TVM passes sizes as values")
    addresses = [_address(program, argument) for argument in call.args[1].fields]
    shapes = [_shape(program, argument.ty) for argument in call.args[1].fields]
    (made,) = call.ty_args
    items = list(made.fields) if hasattr(made, "fields") else [made]
    for index, kind in enumerate(items):
        shape = _shape(program, kind)
        key = binding.var if len(items) == 1 else (binding.var, index)
        if key not in program.places:
            size = ELEMENT_BYTES[str(kind.dtype)]  # type: ignore[index]
            program.places[key] = program.reserve(product(shape) * size)
        addresses.append(program.places[key])
        shapes.append(shape)
    name = f"nest{len(program.functions)}"
    nest = print_nest(module[call.args[0]], name, shapes, ranged=alone)
    program.functions.append(f"static {nest.text}")
    pointers = [
        f"reinterpret_cast<{kind}*>({address})"
        for kind, address in zip(nest.pointers, addresses, strict=True)
    ]
    bounds = ["lo", "hi"] if nest.grid is not None else []
    arguments = [program.reserve(nest.heap_bytes), *pointers, *map(program.c, nest.sizes), *bounds]
    program.calls.append(f"if ({name}({', '.join(arguments)}) != 0) return 1;")
    program.grid = nest.grid if nest.grid is not None else program.grid


def _copy_results(program: _Program, results: list[Any]) -> None:
    """A result that is an input or a constant, or one that is wanted twice, is copied."""
    for index, result in enumerate(results):
        target = f"tensors[{len(program.request.inputs) + index}]"
        source = _address(program, result)
        if source != target:
            kind = program.request.outputs[index]
            size = program.c(product(kind.shape) * ELEMENT_BYTES[kind.dtype])
            program.calls.append(f"std::memcpy({target}, {source}, {size});")


def _source(program: _Program) -> str:
    parameters = (
        "void* const* tensors, const int64_t* dims, void* workspace, int64_t lo, int64_t hi"
    )
    ignored = "".join(f"  (void){name};\n" for name in ("dims", "workspace", "lo", "hi"))
    calls = "".join(f"  {call}\n" for call in program.calls)
    head = '#include "graph_math.h"\n' if "atsc_floor_div" in calls else ""
    return (
        f"{head}{_PRELUDE}{''.join(program.functions)}\n}}  // namespace\n\n"
        f'extern "C" int32_t NAME({parameters}) {{\n{ignored}{calls}  return 0;\n}}\n'
    )
