"""Mutants of a file, drawn at random: one change each, and no two in one place."""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
from dataclasses import dataclass

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from tests.mutants.operators import OPERATORS


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Attributes:
        path: of the file, from the root of the tree
        operator: what was changed
        original, source: the file's text before and after
    """

    path: str
    operator: str
    original: str
    source: str

    @property
    def key(self) -> str:
        """The same for the same change of the same file."""
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]

    @property
    def diff(self) -> str:
        lines = self.original.splitlines(keepends=True), self.source.splitlines(keepends=True)
        return "".join(difflib.unified_diff(*lines, self.path, self.path, n=1))


def draw(path: str, source: str, count: int, rng: random.Random) -> list[Mutant]:
    """``count`` mutants of a file, or as many as it has places, in the order in which they were drawn.

    A place is drawn first and what to change in it second, so that a sum, for which there are six other operators,
    is drawn no more often than a number. What changes only annotations is no mutant.
    """
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    nodes = list(ast_nodes(get_ast(source)))
    for name, kind in OPERATORS.items():
        operator = kind()
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(positions):
            places.setdefault(start, []).append((name, occurrence))
    same = _meaning(source)
    found: list[Mutant] = []
    for place in rng.sample(sorted(places), len(places)):
        if len(found) == count:
            break
        for name, occurrence in rng.sample(places[place], len(places[place])):
            changed = mutate_code(source, OPERATORS[name](), occurrence)
            if _meaning(changed) not in (None, same):
                found.append(Mutant(path, name, source, changed))
                break
    return found


class _WithoutAnnotations(ast.NodeTransformer):
    """Annotations are never evaluated here."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _meaning(source: str) -> str | None:
    """What two texts have in common that do the same, as far as their syntax tells; None for a broken one."""
    try:
        return ast.dump(_WithoutAnnotations().visit(ast.parse(source)))
    except SyntaxError:
        return None
