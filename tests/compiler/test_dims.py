"""Sizes as expressions: normal form, division, and evaluation against plain integers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atsc.compiler.dims import Dim, exact_quotient, largest, product, smallest

B, S = Dim.of("batch"), Dim.of("seq")
_VALUES = st.integers(1, 50)


def test_equal_expressions_are_equal_objects() -> None:
    assert (B + 1) * (S + 2) == S * B + 2 * B + S + 2
    assert str(B - B) == "0"
    assert hash(B * S) == hash(S * B)
    assert str(B * S * 3 + 1) == "3*batch*seq + 1"


def test_division_stays_a_polynomial_where_it_is_exact() -> None:
    assert B * S * 12 // (S * 4) == B * 3
    assert (B * S + S) // (B + 1) == S
    assert exact_quotient(B * S + 1, S) is None
    assert ((S + 1) // 2).evaluate({"seq": 8}) == 4


@settings(deadline=None)
@given(_VALUES, _VALUES, st.integers(-20, 20), st.integers(1, 20))
def test_evaluates_as_integers_do(b: int, s: int, plus: int, by: int) -> None:
    values = {"batch": b, "seq": s}
    assert ((B * S + plus) // by).evaluate(values) == (b * s + plus) // by
    assert largest(B - plus, S).evaluate(values) == max(b - plus, s)
    assert smallest(B, S * by).evaluate(values) == min(b, s * by)
    assert product([B, S, by]).evaluate(values) == b * s * by
    assert (B * S // (B * by)).evaluate(values) == s // by
