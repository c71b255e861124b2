"""Sizes of dimensions as expressions over the symbols of a model's inputs.

A `Dim` is a polynomial with whole coefficients over symbols and over calls that no polynomial
expresses (floor division, max, min), in one normal form: equal polynomials are equal objects,
which is how shapes are proved to agree at compile time. What is left is evaluated at run time, as
generated C.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Operation = Literal["floordiv", "max", "min"]


@dataclass(frozen=True, slots=True)
class Call:
    """Two sizes under an operation that is no polynomial."""

    operation: Operation
    left: Dim
    right: Dim

    def __str__(self) -> str:
        return f"{self.operation}({self.left}, {self.right})"


Atom = str | Call
Monomial = tuple[Atom, ...]
"""A product, sorted; empty for 1."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A size: the sum of coefficient * product, over `terms`, which are sorted and not zero."""

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of(value: int | str | Dim) -> Dim:
        """A number, a symbol, or what is one already."""
        if isinstance(value, Dim):
            return value
        return _normal({(): int(value)} if not isinstance(value, str) else {(value,): 1})

    @property
    def constant(self) -> int | None:
        """Its value where it depends on no symbol."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @property
    def is_never_negative(self) -> bool:
        """Whether its form proves that it is at least 0, its symbols being sizes."""
        return all(factor > 0 and all(map(_is_never_negative, m)) for m, factor in self.terms)

    def symbols(self) -> frozenset[str]:
        """All symbols that it depends on."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                if isinstance(atom, str):
                    found.add(atom)
                else:
                    found |= atom.left.symbols() | atom.right.symbols()
        return frozenset(found)

    def __add__(self, other: int | Dim) -> Dim:
        total = dict(self.terms)
        for monomial, factor in Dim.of(other).terms:
            total[monomial] = total.get(monomial, 0) + factor
        return _normal(total)

    def __mul__(self, other: int | Dim) -> Dim:
        total: dict[Monomial, int] = {}
        for left, x in self.terms:
            for right, y in Dim.of(other).terms:
                monomial = tuple(sorted((*left, *right), key=str))
                total[monomial] = total.get(monomial, 0) + x * y
        return _normal(total)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: int | Dim) -> Dim:
        return self + -Dim.of(other)

    def __rsub__(self, other: int) -> Dim:
        return Dim.of(other) - self

    def __floordiv__(self, other: int | Dim) -> Dim:
        """The quotient rounded down; the divisor must not be zero at run time."""
        divisor = Dim.of(other)
        if divisor.constant == 0:
            raise ZeroDivisionError("a size divided by zero")
        exact = exact_quotient(self, divisor)
        return exact if exact is not None else _call("floordiv", self, divisor)

    def __str__(self) -> str:
        texts = []
        for monomial, factor in self.terms:
            product = "*".join(map(str, monomial))
            if not product:
                texts.append(str(factor))
            else:
                texts.append(product if factor == 1 else f"{factor}*{product}")
        return " + ".join(texts) or "0"

    def evaluate(self, values: Mapping[str, int]) -> int:
        """Its value for values of all its symbols.

        Raises:
            ZeroDivisionError: a divisor is zero.
        """
        total = 0
        for monomial, factor in self.terms:
            for atom in monomial:
                factor *= values[atom] if isinstance(atom, str) else _evaluate(atom, values)
            total += factor
        return total

    def substitute(self, values: Mapping[str, Dim]) -> Dim:
        """With symbols replaced; those that `values` lacks stay."""
        total = Dim.of(0)
        for monomial, factor in self.terms:
            part = Dim.of(factor)
            for atom in monomial:
                if isinstance(atom, str):
                    part = part * values.get(atom, Dim.of(atom))
                else:
                    left, right = atom.left.substitute(values), atom.right.substitute(values)
                    is_quotient = atom.operation == "floordiv"
                    part = part * (
                        left // right if is_quotient else _call(atom.operation, left, right)
                    )
            total = total + part
        return total

    def c(self, names: Mapping[str, str]) -> str:
        """A C expression of type int64_t, in parentheses; `names` has each symbol's C spelling.

        `atsc_floor_div` (templates/common/graph_math.h) must be in sight.
        """
        if self.constant is not None:
            return (
                f"INT64_C({self.constant})" if abs(self.constant) >> 31 else f"({self.constant}L)"
            )
        sums = []
        for monomial, factor in self.terms:
            parts = [names[a] if isinstance(a, str) else _c_call(a, names) for a in monomial]
            if factor != 1 or not parts:
                parts.append(f"{factor}L")
            sums.append(" * ".join(parts))
        return f"({' + '.join(sums)})"


def _is_never_negative(atom: Atom) -> bool:
    if isinstance(atom, str):
        return True
    sides = (atom.left.is_never_negative, atom.right.is_never_negative)
    return any(sides) if atom.operation == "max" else all(sides)


def exact_quotient(dim: Dim, divisor: Dim) -> Dim | None:
    """`dim / divisor` where it is a polynomial without a remainder."""
    known, by = dim.constant, divisor.constant
    if known is not None and by is not None:
        return Dim.of(known // by)
    if not dim.terms:
        return dim
    if len(divisor.terms) == 1:
        quotients = [_divide_term(term, divisor.terms[0]) for term in dim.terms]
        whole = [term for term in quotients if term is not None]
        return _normal(dict(whole)) if len(whole) == len(quotients) else None
    for term in dim.terms:
        quotient = _divide_term(term, divisor.terms[0])
        if quotient is not None:
            guess = _normal(dict([quotient]))
            if guess * divisor == dim:
                return guess
    return None


def largest(left: int | Dim, right: int | Dim) -> Dim:
    """The larger of two sizes."""
    return _call("max", Dim.of(left), Dim.of(right))


def smallest(left: int | Dim, right: int | Dim) -> Dim:
    """The smaller of two sizes."""
    return _call("min", Dim.of(left), Dim.of(right))


def product(dims: Iterable[int | Dim]) -> Dim:
    """All sizes multiplied; 1 for none."""
    return functools.reduce(lambda total, dim: total * dim, dims, Dim.of(1))


def _normal(terms: Mapping[Monomial, int]) -> Dim:
    kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
    return Dim(tuple(sorted(kept, key=lambda term: (-len(term[0]), str(term[0])))))


def _divide_term(
    term: tuple[Monomial, int], by: tuple[Monomial, int]
) -> tuple[Monomial, int] | None:
    rest = list(term[0])
    for atom in by[0]:
        if atom not in rest:
            return None
        rest.remove(atom)
    return (tuple(rest), term[1] // by[1]) if term[1] % by[1] == 0 else None


def _call(operation: Operation, left: Dim, right: Dim) -> Dim:
    call = Call(operation, left, right)
    if left.constant is not None and right.constant is not None:
        return Dim.of(_evaluate(call, {}))
    if left == right and operation != "floordiv":
        return left
    return _normal({(call,): 1})


def _evaluate(call: Call, values: Mapping[str, int]) -> int:
    left, right = call.left.evaluate(values), call.right.evaluate(values)
    if call.operation == "floordiv":
        return left // right
    return max(left, right) if call.operation == "max" else min(left, right)


def _c_call(call: Call, names: Mapping[str, str]) -> str:
    left, right = call.left.c(names), call.right.c(names)
    if call.operation == "floordiv":
        return f"atsc_floor_div({left}, {right})"
    return f"({left} {'>' if call.operation == 'max' else '<'} {right} ? {left} : {right})"
