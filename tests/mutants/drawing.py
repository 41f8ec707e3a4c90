"""Mutants of a file, drawn at random: one change each, by cosmic-ray's operators and two more, no two in one place."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Name

# Operators replace those of their kind; one of another kind mostly ends in a TypeError, which any test notices.
_KINDS = ("Add|Sub|Mul|Div|FloorDiv|Mod|Pow", "BitAnd|BitOr|BitXor", "Eq|NotEq|Lt|LtE|Gt|GtE", "Is|IsNot")
_SUITABLE = re.compile(
    "core/(AddNot|ExceptionReplacer|NumberReplacer|RemoveDecorator|ZeroIterationForLoop"
    r"|Replace(And|Or|True|False|Break|Continue)With\w+|ReplaceUnaryOperator_Delete_(Invert|Not|USub)"
    + "".join(rf"|Replace(Binary|Comparison)Operator_({kind})_({kind})" for kind in _KINDS)
    + ")"
)
_PAIRS = {"min": "max", "amin": "amax", "minimum": "maximum", "cummin": "cummax", "tril_": "triu_"}
# ``positive`` gives the tensor itself, with its gradient.
_SWAPS = {"detach": "positive", **_PAIRS, **{other: one for one, other in _PAIRS.items()}}

Span = tuple[tuple[int, int], tuple[int, int]]


class _Own(Operator):
    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class SwapName(_Own):
    """A minimum for a maximum, an upper triangle for a lower one, a gradient where none was to go."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if isinstance(node, Name) and node.value in _SWAPS:
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _SWAPS[node.value]
        return node


class DropBound(_Own):
    """A slice without its beginning or without its end."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        for bound in self._bounds(node):
            yield bound.start_pos, bound.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children.remove(self._bounds(node)[index])
        return node

    @staticmethod
    def _bounds(node: Any) -> list[Any]:
        parts = node.children if node.type == "subscript" else []
        return [part for part in parts if part.type not in ("operator", "sliceop")]


_OPERATORS = [get_operator(name) for name in sorted(operator_names()) if _SUITABLE.fullmatch(name)]
_OPERATORS += [SwapName, DropBound]


def draw(source: str, count: int, rng: random.Random) -> Iterator[str]:
    """Up to ``count`` mutants of a file's text, in the order in which they were drawn.

    A place is drawn first and what to change in it second, so that a sum, for which there are six other operators,
    is drawn no more often than a number. What changes only annotations is no mutant.
    """
    places: dict[tuple[int, int], list[tuple[type[Operator], int]]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for kind in _OPERATORS:
        starts = [start for node in nodes for start, _ in kind().mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            places.setdefault(start, []).append((kind, occurrence))
    for place in rng.sample(sorted(places), len(places)):
        changes = [mutate_code(source, kind(), occurrence) for kind, occurrence in places[place]]
        changes = [change for change in changes if _meaning(change) not in (None, _meaning(source))]
        if changes and count:
            count -= 1
            yield rng.choice(changes)


def _meaning(source: str) -> str | None:
    """What two texts have in common that do the same, as far as their syntax tells; None for a broken one."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in {"annotation", "returns"}.intersection(node._fields):
            setattr(node, name, None)
    return ast.dump(tree)
