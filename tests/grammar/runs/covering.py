"""Combinations of factors that cover all pairs of their values, and some larger sets, by a greedy choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
_Set = frozenset[tuple[str, str]]  # values of some factors


def covering(factors: Factors, num_rows: int, together: Sequence[str] = (), seed: int = 0) -> list[Row]:
    """Return `num_rows` combinations: first those that cover all pairs, then those of the factors `together`.

    The rest is random.
    """
    draw = Random(seed)
    missing = set[_Set]()
    for two in combinations(factors, 2):
        missing |= _sets(factors, two)
    later = _sets(factors, together)
    rows: list[Row] = []
    while len(rows) < num_rows:
        missing, later = missing or later, later if missing else set()
        rows.append(_next_row(factors, missing, draw))
        missing -= _covered(rows[-1], missing)
        later -= _covered(rows[-1], later)
    return rows


def pairs_left(factors: Factors, rows: Iterable[Row]) -> int:
    """Return how many pairs of values are in no row."""
    missing = set[_Set]().union(*(_sets(factors, two) for two in combinations(factors, 2)))
    for row in rows:
        missing -= _covered(row, missing)
    return len(missing)


def _sets(factors: Factors, names: Sequence[str]) -> set[_Set]:
    values = product(*(factors[name] for name in names))
    return {frozenset(zip(names, one, strict=True)) for one in values} if names else set()


def _covered(row: Row, missing: set[_Set]) -> set[_Set]:
    own = set(row.items())
    return {one for one in missing if one <= own}


def _next_row(factors: Factors, missing: set[_Set], draw: Random) -> Row:
    """Begin with a set that is missing, then give each factor the value that covers most."""
    row: Row = dict(draw.choice(sorted(missing, key=sorted))) if missing else {}
    names = [name for name in factors if name not in row]
    draw.shuffle(names)
    for name in names:
        choices = list(factors[name])
        draw.shuffle(choices)
        known = {*row, name}
        open_sets = [one for one in missing if any(own == name for own, _ in one) and {own for own, _ in one} <= known]
        row[name] = max(choices, key=lambda value: sum(one <= {*row.items(), (name, value)} for one in open_sets))
    return {name: row[name] for name in factors}
