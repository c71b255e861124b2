"""From a graph of ONNX operators to buffers and kernel calls.

Nodes are taken in order; each operator's rule (`rules`) makes tensors of tensors. What the rules
fuse and what they store is said in tensor.py. Sizes that two tensors must agree on, and that only
run time tells, become `Check`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.codegen.graph.diamonds import FINISHING, meeting_values
from atsc.codegen.graph.kernels import Call, map_call
from atsc.codegen.graph.products import PackedRight, packed_constant
from atsc.codegen.graph.tensor import (
    CHEAP,
    DEAR,
    Buffer,
    Code,
    Index,
    Stored,
    Tensor,
    known_tensor,
    linear,
    scalar_literal,
    stored,
)
from atsc.codegen.tail import ELEMENT_BYTES, ElementType
from atsc.compiler.dims import Dim, largest
from atsc.compiler.errors import ModelError, UnsupportedError
from atsc.compiler.tensor_graph import (
    NIBBLES,
    Constant,
    GraphInput,
    OnnxNode,
    TensorGraph,
)

Inputs = Sequence[Tensor | None]
Problem = dict[str, str | int | None]
"""What UnsupportedError lists."""
Rule = Callable[["Lowering", OnnxNode, list[Any]], "Tensor | tuple[Tensor | None, ...]"]
_MOST_LITERAL_ELEMENTS = 4096
_MAX_RANK = 8
"""Of inputs and outputs: ATSC_MAX_RANK of the C interface. Tensors inside may have more."""
_SHAPE_READERS = ("Shape", "Size")
_MOST_COST_OF_DIAMOND = 16 * DEAR
_READS_NIBBLES = ("DequantizeLinear", "GatherBlockQuantized")
"""Operators whose outputs never have the 4-bit type of a constant that they read."""
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What rules meet where inputs or attributes are missing, or of other kinds than they must be."""


@dataclass(frozen=True, slots=True)
class Check:
    """Two sizes that must be equal when the graph runs, or the first at least the second."""

    left: Dim
    right: Dim
    what: str
    """Node and reason."""
    is_least: bool = False
    """Whether `right` is only the least that `left` may be."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a graph became."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    constants: Mapping[Buffer, Constant]
    calls: tuple[Call, ...]
    checks: tuple[Check, ...]

    @property
    def temporaries(self) -> tuple[Buffer, ...]:
        """Buffers between calls, in order of first use."""
        given = {*self.inputs, *self.constants, *self.outputs}
        made = dict.fromkeys(buffer for call in self.calls for buffer in call.outputs)
        return tuple(buffer for buffer in made if buffer not in given)


class RefusedError(ModelError):
    """An operator, type or attribute that a rule does not cover."""


class Lowering:
    """The state of `lower`, and what rules work with."""

    def __init__(self, graph: TensorGraph, rules: Mapping[tuple[str, str], Rule]) -> None:
        self.graph = graph
        self.rules = rules
        self.calls: list[Call] = []
        self.checks: dict[tuple[Dim, Dim], Check] = {}
        self.constants: dict[Buffer, Constant] = {}
        self.node = ""
        self._values: dict[str, Tensor | None] = {}
        self._uses: Counter[str] = Counter(graph.outputs)
        for node in graph.nodes:
            if node.op not in _SHAPE_READERS:
                self._uses.update(node.reads)
        self._constants = dict(graph.constants)
        self._packed: dict[tuple[Buffer, tuple[Dim, ...], tuple[Dim, ...]], Buffer] = {}
        self._held: dict[tuple[str, tuple[int, ...], bytes], Buffer] = {}
        self._meeting = meeting_values(graph)

    def value(self, name: str) -> Tensor | None:
        """A value by its name; None for an absent one."""
        if not name:
            return None
        if name not in self._values and name in self._constants:
            self._values[name] = self._constant(name, self._constants[name])
        if (found := self._values.get(name)) is None:
            raise RefusedError(f"its input {name} is not made by any node")
        return found

    def bind_input(self, given: GraphInput) -> Buffer:
        """An input of the graph."""
        buffer = Buffer(given.name, element_type(given.dtype), given.shape)
        self._values[given.name] = stored(buffer)
        return buffer

    def run(self, node: OnnxNode, rule: Rule) -> None:
        """Apply a node's rule; bind its outputs."""
        self.node = node.name
        inputs = [self._input(node, name) for name in node.inputs]
        if (node.domain, node.op) not in FINISHING:
            inputs = [x if x is None or x.product is None else self._finished(x) for x in inputs]
        made = rule(self, node, inputs)
        results = made if isinstance(made, tuple) else (made,)
        wanted = [place for place, name in enumerate(node.outputs) if name]
        if wanted and wanted[-1] >= len(results):
            raise RefusedError(f"its output {node.outputs[wanted[-1]]} is not supported")
        for place in wanted:
            name, tensor = node.outputs[place], results[place]
            if tensor is None:
                raise RefusedError(f"its output {name} is not supported")
            for size in tensor.shape:
                self.at_least(size, 0, "a size of its result")
            if tensor.quantised is not None and self._uses[name] > 1:
                tensor = self.store_codes(tensor)  # bytes are read faster than floats
            elif tensor.known is None and self._uses[name] > 1 and tensor.cost > 1:
                # Costs count what is read twice twice, as does the work here.
                limit = DEAR if tensor.product is None else _MOST_COST_OF_DIAMOND
                if not (tensor.cost < limit and name in self._meeting):
                    tensor = self.store(tensor)
            self._values[name] = tensor

    def _finished(self, x: Tensor) -> Tensor:
        """A function of a product, for readers that do not finish it."""
        return self.store(x) if x.quantised is None else self.store_codes(x)

    def store_codes(self, x: Tensor) -> Tensor:
        """Dequantised floats, of which the integers are in memory."""
        assert x.quantised is not None
        codes = x.quantised.codes
        return x if isinstance(codes, Stored) else x.quantised.dequantised(self.store(codes))

    def _input(self, node: OnnxNode, name: str) -> Tensor | None:
        constant = self._constants.get(name)
        if constant is None or constant.dtype not in NIBBLES or node.op not in _READS_NIBBLES:
            return self.value(name)
        return self._nibbles(name, constant)

    def branch(self, node: OnnxNode) -> TensorGraph:
        """The branch that an If takes, whose names become known.

        Raises:
            RefusedError: its condition depends on data.
        """
        (condition,) = (self.value(name) for name in node.inputs)
        content = condition.known if condition is not None else None
        known = content.reshape(-1)[0].constant if content is not None and content.size else None
        if known is None:
            raise RefusedError("its condition depends on data; export the model without it")
        taken: TensorGraph = node.attrs["then_branch" if known else "else_branch"]
        self._constants |= taken.constants
        return taken

    def bind_branch(self, node: OnnxNode, taken: TensorGraph) -> None:
        """The outputs of an If are those of its branch."""
        for name, inner in zip(node.outputs, taken.outputs, strict=True):
            self._values[name] = self.value(inner)

    def array(self, array: NDArray[Any]) -> Tensor:
        """A constant that a rule made."""
        return self._constant(f"{self.node}.{len(self.constants)}", Constant.of(array))

    def constant_type(self, name: str) -> str:
        """The element type that a constant has in the model: 4-bit integers are widened here.

        Raises:
            RefusedError: it is no constant.
        """
        if name not in self._constants:
            raise RefusedError(f"its input {name} must be a constant")
        return self._constants[name].dtype

    def _nibbles(self, name: str, constant: Constant) -> Tensor:
        """4-bit integers, which stay packed in memory, as integers of 8 bits."""
        shape = tuple(Dim.of(size) for size in constant.shape)
        size = constant.num_bytes
        packed = Buffer(name, "uint8", (Dim.of(size),))
        self.constants[packed] = Constant("uint8", (size,), constant.read)
        is_signed = constant.dtype == "int4"

        def at(code: Code, index: Index) -> str:
            place = code.index(linear(code, shape, index))
            bits = f"({code.load(packed, f'{place} / 2')} >> (int)({place} % 2) * 4 & 15)"
            return f"(int8_t)(({bits} ^ 8) - 8)" if is_signed else f"(uint8_t){bits}"

        return Tensor("int8" if is_signed else "uint8", shape, at, cost=3)

    def _constant(self, name: str, constant: Constant) -> Tensor:
        dtype = element_type(constant.dtype)
        shape = tuple(Dim.of(size) for size in constant.shape)
        count = int(np.prod(constant.shape, dtype=np.int64))
        literal = constant.read() if count <= _MOST_LITERAL_ELEMENTS else None
        if literal is not None and dtype in ("int64", "int32", "bool") and count <= 64:
            small = known_tensor(literal.astype(object), dtype)
            if count == 1:
                text = scalar_literal(dtype, literal.item())
                return replace(small, at=lambda code, index: text, cost=0, literal=literal)
            return replace(small, literal=literal)
        if literal is not None and count == 1 and dtype != "bfloat16":
            text = scalar_literal(dtype, literal.item())
            return Tensor(dtype, shape, lambda code, index: text, literal=literal)
        buffer = Buffer(name, dtype, shape)
        self.constants[buffer] = constant
        return replace(stored(buffer), literal=literal)

    def held(self, tensor: Tensor) -> Tensor:
        """A constant in memory, not in the kernel's text: equal layers then share their kernels."""
        content = tensor.literal
        if content is None or isinstance(tensor, Stored):
            return tensor
        key = (tensor.dtype, content.shape, content.tobytes())
        if key not in self._held:
            name = f"{self.node}.held.{len(self._held)}"
            self._held[key] = Buffer(name, tensor.dtype, tensor.shape)
            self.constants[self._held[key]] = Constant.of(content)
        return replace(stored(self._held[key]), literal=content)

    def store(self, tensor: Tensor) -> Stored:
        """A tensor in memory, as it is or by a kernel of its own."""
        if isinstance(tensor, Stored):
            return tensor
        buffer = self.buffer(tensor.dtype, tensor.shape)
        self.calls.append(self.call_of(tensor, buffer))
        return stored(buffer)

    def call_of(self, tensor: Tensor, target: Buffer) -> Call:
        """The kernel that stores a tensor."""
        if tensor.product is not None:
            return tensor.product.call(self.node, tensor, target)
        return map_call(self.node, tensor, target)

    def packed(self, tensor: Tensor) -> PackedRight | None:
        """A constant float32 matrix as the right operand of products; None: it is none."""
        view = tensor.view
        if view is None or view.buffer not in self.constants or tensor.dtype != "float32":
            return None
        if any(size.constant is None for size in tensor.shape):
            return None
        if any(size.constant != 1 for size in tensor.shape[:-2]) or tensor.size.constant == 0:
            return None
        key = (view.buffer, tensor.shape[-2:], view.strides[-2:])
        if key not in self._packed:
            name = f"{view.buffer.name}.panels.{len(self._packed)}"
            buffer, content = packed_constant(name, self.constants[view.buffer], view, tensor.shape)
            self._packed[key], self.constants[buffer] = buffer, content
        return PackedRight(self._packed[key])

    def buffer(self, dtype: ElementType, shape: tuple[Dim, ...]) -> Buffer:
        """A new buffer, for a kernel to write."""
        return Buffer(f"{self.node}:{len(self.calls)}", dtype, shape)

    def cheap(self, tensor: Tensor, limit: int = CHEAP) -> Tensor:
        """A tensor whose elements may be read more than once."""
        return self.store(tensor) if tensor.cost > limit else tensor

    def agree(self, left: Dim, right: Dim, what: str) -> Dim:
        """Two sizes that must be equal; the simpler of them.

        Raises:
            RefusedError: they never are.
        """
        if left == right:
            return left
        if left.constant is not None and right.constant is not None:
            raise RefusedError(f"{what}: {left} and {right} differ")
        self.checks.setdefault((left, right), Check(left, right, f"{self.node}: {what}"))
        return right if right.constant is not None else left

    def at_least(self, size: Dim, least: int | Dim, what: str) -> None:
        """A size that must not be smaller.

        Raises:
            RefusedError: it always is.
        """
        least = Dim.of(least)
        if (size - least).is_never_negative:
            return
        if size.constant is not None and least.constant is not None:
            raise RefusedError(f"{what} is {size}, and must be at least {least}")
        check = Check(size, least, f"{self.node}: {what}", is_least=True)
        self.checks.setdefault((largest(size, least), size), check)

    def broadcast(self, shapes: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
        """The common shape of operands, aligned at their last dimension."""
        result: list[Dim] = []
        for shape in shapes:
            missing = len(shape) - len(result)
            result = [Dim.of(1)] * missing + result
            for place, size in enumerate(shape, len(result) - len(shape)):
                if result[place].constant == 1:
                    result[place] = size
                elif size.constant != 1:
                    result[place] = self.agree(result[place], size, "sizes that are broadcast")
        return tuple(result)

    def dims(self, tensor: Tensor, what: str) -> list[Dim]:
        """The content of a tensor of sizes.

        Raises:
            RefusedError: it depends on more than the shapes of inputs.
        """
        if tensor.known is None:
            raise RefusedError(
                f"{what} depends on data; export the model with it as a constant, or computed from "
                "shapes"
            )
        return [Dim.of(value) for value in tensor.known.reshape(-1)]

    def ints(self, tensor: Tensor, what: str) -> list[int]:
        """The content of a tensor of constant integers."""
        found = []
        for dim in self.dims(tensor, what):
            if dim.constant is None:
                raise RefusedError(f"{what} depends on the inputs' sizes ({dim})")
            found.append(dim.constant)
        return found

    def content(self, tensor: Tensor, what: str) -> NDArray[Any]:
        """The content of a constant."""
        if tensor.literal is not None:
            return tensor.literal
        if isinstance(tensor, Stored) and tensor.buffer in self.constants:
            return self.constants[tensor.buffer].read()
        if tensor.known is not None and all(d.constant is not None for d in tensor.known.flat):
            return np.array([d.constant for d in tensor.known.flat]).reshape(tensor.known.shape)
        raise RefusedError(f"{what} must be a constant")


def aligned(tensor: Tensor, index: Index) -> list[str]:
    """The index of a broadcast operand, from that of the result."""
    own = index[len(index) - tensor.rank :]
    return ["0" if size.constant == 1 else at for size, at in zip(tensor.shape, own, strict=True)]


def element_type(name: str) -> ElementType:
    """A type's name, checked.

    Raises:
        RefusedError: kernels have no such elements.
    """
    if name not in ELEMENT_BYTES:
        raise RefusedError(f"elements of type {name} are not supported")
    return name


def lower(
    graph: TensorGraph, rules: Mapping[tuple[str, str], Rule], fallback: Rule | None = None
) -> Program:
    """All kernels of a graph.

    Args:
        graph: the model.
        rules: by domain and operator.
        fallback: takes the nodes that have no rule.

    Raises:
        UnsupportedError: what no rule covers, all such inputs and nodes in one message.
    """
    g = Lowering(graph, rules)
    problems: list[Problem] = []
    broken: set[str] = set()
    inputs = _bind_inputs(g, problems, broken)
    _run_nodes(g, graph.nodes, fallback, problems, broken)
    _check_outputs(g, problems, broken)
    if problems:
        raise UnsupportedError(graph.name, problems)
    outputs = _outputs(g)
    calls, checks = _needed(g.calls, outputs), tuple(g.checks.values())
    used = {buffer for call in calls for buffer in call.inputs}
    constants = {buffer: c for buffer, c in g.constants.items() if buffer in used}
    return Program(inputs, outputs, constants, calls, checks)


def _bind_inputs(g: Lowering, problems: list[Problem], broken: set[str]) -> tuple[Buffer, ...]:
    """The inputs of the graph; what cannot be handed in is a problem."""
    bound = []
    for given in g.graph.inputs:
        try:
            _check_rank(len(given.shape))
            bound.append(g.bind_input(given))
        except RefusedError as error:
            problems.append(_problem(given.name, "input of the model", None, error))
            broken.add(given.name)
    return tuple(bound)


def _check_outputs(g: Lowering, problems: list[Problem], broken: set[str]) -> None:
    """Outputs that cannot be handed out are a problem of the nodes that make them."""
    makers = {name: node for node in g.graph.nodes for name in node.outputs}
    for name in g.graph.outputs:
        if name in broken:
            continue
        try:
            tensor = g.value(name)
            assert tensor is not None
            _check_rank(tensor.rank)
        except RefusedError as error:
            if name in makers:
                problems.append(_node_problem(makers[name], f"its output {name}: {error}"))
            else:
                problems.append(_problem(name, "output of the model", None, error))


def _check_rank(rank: int) -> None:
    if rank > _MAX_RANK:
        raise RefusedError(
            f"it has {rank} dimensions; inputs and outputs have at most {_MAX_RANK}: export the "
            "model with some of them merged"
        )


def _run_nodes(
    g: Lowering,
    nodes: Sequence[OnnxNode],
    fallback: Rule | None,
    problems: list[Problem],
    broken: set[str],
) -> None:
    """Apply the rules; what reads the results of a refused node is left out, without complaint."""
    for node in nodes:
        if broken & set(node.inputs):
            broken.update(node.outputs)
            continue
        try:
            if (node.domain, node.op) == ("", "If"):
                taken = g.branch(node)
                _run_nodes(g, taken.nodes, fallback, problems, broken)
                if broken & set(taken.outputs):
                    broken.update(node.outputs)
                else:
                    g.bind_branch(node, taken)
                continue
            rule = g.rules.get((node.domain, node.op), fallback)
            if rule is None:
                raise RefusedError("no such operator here")
            g.run(node, rule)
        except (RefusedError, ZeroDivisionError) as error:
            problems.append(_node_problem(node, error))
            broken.update(node.outputs)
        except _MALFORMED as error:
            problems.append(_node_problem(node, f"not as ONNX says it must be ({error!r})"))
            broken.update(node.outputs)


def _node_problem(node: OnnxNode, reason: object) -> Problem:
    return _problem(node.name, f"{node.op} ({node.domain or 'ai.onnx'})", node.opset, reason)


def _problem(name: str, operator: str, opset: int | None, reason: object) -> Problem:
    return {"node": name, "operator": operator, "opset": opset, "reason": str(reason)}


def _outputs(g: Lowering) -> tuple[Buffer, ...]:
    """Each output of the graph in a buffer of its own, into which its kernel writes if it can."""
    makers = {node_output: node.name for node in g.graph.nodes for node_output in node.outputs}
    made = {buffer for call in g.calls for buffer in call.outputs}
    targets: dict[Buffer, Buffer] = {}
    outputs = []
    for name in g.graph.outputs:
        g.node = makers.get(name, name)
        tensor = g.value(name)
        assert tensor is not None
        target = Buffer(name, tensor.dtype, tensor.shape)
        outputs.append(target)
        if isinstance(tensor, Stored) and tensor.buffer in made and tensor.buffer not in targets:
            targets[tensor.buffer] = target
        else:
            g.calls.append(g.call_of(tensor, target))
    # At the end, since calls of other outputs may read what these write.
    g.calls = [
        replace(
            call,
            inputs=tuple(targets.get(buffer, buffer) for buffer in call.inputs),
            outputs=tuple(targets.get(buffer, buffer) for buffer in call.outputs),
        )
        for call in g.calls
    ]
    return tuple(outputs)


def _needed(calls: list[Call], outputs: tuple[Buffer, ...]) -> tuple[Call, ...]:
    """Without calls whose results nobody reads."""
    wanted = set(outputs)
    kept: list[Call] = []
    for call in reversed(calls):
        if wanted & set(call.outputs):
            kept.append(call)
            wanted.update(call.inputs)
    return tuple(reversed(kept))


__all__ = ["Check", "Code", "Lowering", "Program", "RefusedError", "Rule", "aligned", "lower"]
