"""The state of an import: canonical nodes and weights so far, and what every ONNX value became.

A `Rule` says in data which attributes and inputs of an operator are understood; whatever a node has
beyond that is a problem, and the import goes on, so that one error names every such node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir

from atsc.compiler.errors import ModelError, UnsupportedError
from atsc.compiler.importers.onnx.model_file import ModelFile
from atsc.compiler.importers.onnx.operands import (
    BlockOffsets,
    Constant,
    Ints,
    Operand,
    Rows,
    Symbol,
    Unknown,
)
from atsc.compiler.importers.onnx.quantized import has_blocks, quantized_weight
from atsc.compiler.importers.onnx.weights import LastRead, as_vector, float_weight
from atsc.compiler.ir import AttrValue, Node, Weight


@dataclass(frozen=True, slots=True)
class Attr:
    """An attribute that a rule understands."""

    default: Any = None
    accepted: tuple[Any, ...] | None = None
    """The values that have an implementation; None: the rule checks it, or all are fine."""
    kind: type = int
    """The type of its values where there is no default to tell."""
    required: bool = False

    def problem(self, name: str, value: Any) -> str | None:
        """What is wrong with a value; None stands for an attribute that is absent."""
        if value is None:
            return f"attribute {name} is missing" if self.required else None
        kind = self.kind if self.default is None else type(self.default)
        if not isinstance(value, kind):
            return f"attribute {name} is {value!r}, expected {kind.__name__}"
        if self.accepted is not None and value not in self.accepted:
            wanted = " or ".join(map(str, self.accepted))
            return f"attribute {name} is {value}, supported: {wanted}"
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """How one ONNX operator becomes canonical nodes."""

    domain: str
    op_type: str
    lower: Callable[[Lowering, OnnxNode], None]
    inputs: tuple[str, ...]
    """Slot names that are understood; `?` marks an optional one, a trailing `*` any number."""
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    """Slot names; only those listed may be used, an empty name stands for one that may not."""


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node with its operands, and its attributes completed with defaults."""

    name: str
    op_type: str
    inputs: tuple[Operand | None, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]

    def input(self, index: int) -> Operand | None:
        """An input, or None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def rows(self, index: int, *, grouped: bool = False) -> Rows:
        """An input that must be activations.

        Raises:
            ModelError: it is something else.
        """
        operand = self.input(index)
        if not isinstance(operand, Rows):
            raise ModelError(f"input {index} is {_describe(operand)}, expected activations")
        if operand.group and not grouped:
            raise ModelError(f"input {index} is reshaped to heads of {operand.group}")
        return operand

    def constant(self, index: int, *, floats: bool = True) -> Constant:
        """An input that must be an initializer or a constant.

        Raises:
            ModelError: it is something else, or not of floats where they are wanted.
        """
        operand = self.input(index)
        if not isinstance(operand, Constant):
            raise ModelError(f"input {index} is {_describe(operand)}, expected a constant")
        if floats and not operand.is_float:
            raise ModelError(f"input {index} has elements of type {operand.elements.name}")
        return operand

    def optional_constant(self, index: int) -> Constant | None:
        """A float constant, or None where the input is absent."""
        return None if self.input(index) is None else self.constant(index)

    def output(self, index: int = 0) -> str:
        """The name of an output; empty if it is absent."""
        return self.outputs[index] if index < len(self.outputs) else ""


class Lowering:
    """Canonical nodes, weights and operands so far; the rules write to it."""

    def __init__(
        self, file: ModelFile, accuracy_level: int | None, context: int | None = None
    ) -> None:
        self.file = file
        self.accuracy_level = accuracy_level
        self.nodes: list[Node] = []
        self.weights: dict[str, Weight] = {}
        self.operands: dict[str, Operand] = {}
        self.num_attentions = 0
        self.rope_rows: list[int] = []
        """Positions that each table of angles covers."""
        self.context = context
        self.length_limits: list[int] = []
        """Tokens up to which the branches that were chosen hold."""
        self.last_read = LastRead()
        self.lower_body: Callable[[onnx_ir.Graph], None] | None = None
        """Lowers a branch in place of its node; the importer sets it."""
        self.selected: set[str] = set()
        """Values of selected rows, [B, W] or [B, 1, W] in ONNX."""
        self._weight_of: dict[tuple[object, ...], str] = {}
        self._node_names: set[str] = set()
        self._problems: list[tuple[str, str, str]] = []

    def emit(
        self, op: str, name: str, inputs: tuple[str, ...], output: str, **attrs: AttrValue
    ) -> None:
        """Append a canonical node with one output; absent trailing inputs are dropped."""
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        # ONNX does not ask for unique node names; the output's name is unique.
        name = f"{name}#{output}" if name in self._node_names else name
        self._node_names.add(name)
        self.nodes.append(Node(op, name, inputs, (output,), attrs))

    def bind(self, output: str, operand: Operand) -> None:
        """Say what an ONNX value is; an absent output is ignored."""
        if output:
            self.operands[output] = operand

    def weight(self, key: tuple[object, ...], name: str, make: Callable[[str], Weight]) -> str:
        """The name of the one weight for `key`, made on first use under a name that is free."""
        if key not in self._weight_of:
            free, copies = name, 1
            while free in self.weights:
                copies += 1
                free = f"{name}#{copies}"
            self.weights[free] = make(free)
            self._weight_of[key] = free
        return self._weight_of[key]

    def matrix(self, constant: Constant) -> str:
        """A float matrix as a weight, one for every use of the same view."""
        if len(constant.shape) != 2:
            raise ModelError(f"{constant.root} has shape {list(constant.shape)}, expected a matrix")
        if constant.quantized is not None and has_blocks(constant):
            key: tuple[object, ...] = ("quantized", *constant.identity)
            return self.weight(
                key, constant.root, lambda name: quantized_weight(name, constant, self.last_read)
            )
        key = ("float", *constant.identity, constant.shape)
        return self.weight(key, constant.root, lambda name: float_weight(name, constant))

    def vector(self, constant: Constant, width: int | None = None) -> str:
        """A float constant of one row as a weight [width]."""
        flat = as_vector(constant, width)
        key = ("vector", *constant.identity, flat.shape)
        return self.weight(key, constant.root, lambda name: float_weight(name, flat))

    def report(self, node: str, subject: str, reason: str) -> None:
        """Note something that is not supported."""
        self._problems.append((node, subject, reason))

    def raise_problems(self) -> None:
        """Raise one error for all problems so far.

        Raises:
            UnsupportedError: there is one.
        """
        if not self._problems:
            return
        versions = {
            domain or "ai.onnx": version
            for domain, version in self.file.model.graph.opset_imports.items()
        }
        nodes: list[dict[str, str | int | None]] = [
            {
                "node": name,
                "operator": subject,
                "opset": versions.get(subject.rpartition(" (")[2].removesuffix(")")),
                "reason": reason,
            }
            for name, subject, reason in self._problems
        ]
        raise UnsupportedError(str(self.file.path), nodes)


def lower_node(lowering: Lowering, node: onnx_ir.Node, rule: Rule | None) -> None:
    """Lower one node, or note why that is not possible."""
    outputs = tuple(output.name or "" for output in node.outputs)
    name = node.name or next(filter(None, outputs), node.op_type)
    subject = f"{node.op_type} ({node.domain or 'ai.onnx'})"
    problems = [f"operator {node.op_type} is not supported"] if rule is None else []
    attrs: dict[str, Any] = {}
    if rule is not None:
        attrs, problems = _check(node, rule)
    operands = tuple(
        None if value is None or not value.name else lowering.operands.get(value.name, Unknown())
        for value in node.inputs
    )
    if rule is not None and not problems and not any(isinstance(o, Unknown) for o in operands):
        try:
            rule.lower(lowering, OnnxNode(name, node.op_type, operands, outputs, attrs))
            return
        except ModelError as error:
            problems = [str(error)]
    if problems:
        lowering.report(name, subject, "; ".join(problems))
    for output in outputs:
        lowering.bind(output, Unknown())


def refuse_node(lowering: Lowering, node: onnx_ir.Node, reason: str) -> None:
    """Note why a node cannot be lowered; an empty reason is that of another node."""
    subject = f"{node.op_type} ({node.domain or 'ai.onnx'})"
    if reason:
        lowering.report(node.name or node.op_type, subject, reason)
    for output in node.outputs:
        lowering.bind(output.name or "", Unknown())


def _check(node: onnx_ir.Node, rule: Rule) -> tuple[dict[str, Any], list[str]]:
    """Attributes with defaults, and what of the node the rule does not understand."""
    found = {name: _plain(attr) for name, attr in node.attributes.items()}
    problems = []
    for name in found.keys() - rule.attrs.keys():
        problems.append(f"attribute {name} is not supported")
    attrs = {name: attr.default for name, attr in rule.attrs.items()} | found
    wrong = (attr.problem(name, attrs[name]) for name, attr in rule.attrs.items())
    problems += filter(None, wrong)
    any_number = rule.inputs[-1:] == ("*",)
    for index, value in enumerate(node.inputs):
        present = value is not None and bool(value.name)
        slot = rule.inputs[index] if index < len(rule.inputs) else "*" if any_number else ""
        if present and not slot:
            problems.append(f"input {index} is not supported")
        elif present and slot.startswith("!"):
            problems.append(f"input {index} ({slot[1:]}) is not supported")
    for index, slot in enumerate(rule.inputs):
        required = not slot.endswith("?") and slot[:1] not in ("!", "*")
        if required and (index >= len(node.inputs) or node.inputs[index] is None):
            problems.append(f"input {index} ({slot}) is missing")
    for index, output in enumerate(node.outputs):
        slot = rule.outputs[index] if index < len(rule.outputs) else ""
        slot = slot or ("*" if rule.outputs == ("*",) else "")
        if output.name and not slot and (output.uses() or output.is_graph_output()):
            problems.append(f"output {index} is not supported")
    return attrs, sorted(problems)


def _plain(attr: onnx_ir.Attr) -> Any:
    if attr.is_ref():
        return f"a reference to {attr.ref_attr_name}"
    return tuple(attr.value) if isinstance(attr.value, list | tuple) else attr.value


def _describe(operand: Operand | None) -> str:
    if operand is None:
        return "absent"
    if isinstance(operand, Constant):
        return f"the constant {operand.root}"
    if isinstance(operand, Symbol):
        return f"the {operand.kind.replace('_', ' ')} {operand.name}"
    if isinstance(operand, Ints):
        return "shape arithmetic"
    if isinstance(operand, BlockOffsets):
        return f"rows of the table {operand.constant.root}"
    return "activations"
