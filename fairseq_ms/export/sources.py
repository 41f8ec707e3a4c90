"""One file out of many: the definitions that some classes need, as they stand in the sources of this package.

Which they are is read off the sources: from the roots, every name that a definition uses is followed to where it is
defined, through imports too. What a class or function does not use, such as the flags of a model and its registration
with fairseq, stays behind. Names in annotations are followed too.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

OWN = ("fairseq_ms", "fairseq_ms_pipeline")
"""Packages whose definitions are copied."""

_HOST = ("fairseq", "omegaconf", "hydra")


class CannotCollect(ValueError):
    """A definition cannot be moved into one file; the message says why."""


@dataclass(frozen=True)
class Name:
    """A name as a module defines it."""

    module: str
    name: str


@dataclass(frozen=True)
class External:
    """``import module`` (``name`` is None) or ``from module import name``, as ``bound``."""

    module: str
    name: str | None
    bound: str


@dataclass
class Definition:
    """A statement at the top of a module: its text, and the names that running and annotating it uses."""

    text: str
    used: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    spread: bool = False


@dataclass
class Source:
    """A module as its file has it: definitions by name, in order, and what it imports, by the bound name."""

    module: str
    docstring: str
    definitions: dict[str, Definition]
    imports: dict[str, External]
    for_types: dict[str, External]


def collected(roots: Sequence[Name], docstring: str, beside: Mapping[str, str], ending: str = "") -> str:
    """The text of one module that defines the roots and all they need.

    Args:
        roots: what to define; every module comes behind those that it imports
        docstring: of the new module
        beside: modules that become files beside this one, and the names of these files, without ``.py``
        ending: text behind the definitions, which may name the roots

    Two definitions of one name are told apart by that of their modules. Raises CannotCollect where something of
    fairseq's is needed, and where imports would have one name.
    """
    needed, externals = _closure(roots, beside)
    renamed = _renamed(needed, externals)
    sections = [_section(module, needed, renamed, beside) for module in _in_order(needed, roots)]
    imports = _import_lines(externals, beside)
    head = f'"""{docstring}"""\n\nfrom __future__ import annotations\n\n{imports}'
    return "\n\n\n".join([head, *sections, *([ending] if ending else [])]) + "\n"


@cache
def read(module: str) -> Source:
    """The source of a module of ``OWN``."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CannotCollect(f"{module} has no source to copy")
    text = Path(spec.origin).read_text(encoding="utf-8")
    return parse(module, text)


def parse(module: str, text: str) -> Source:
    """``read`` of a text."""
    tree, lines = ast.parse(text), text.splitlines()
    source = Source(module, ast.get_docstring(tree) or "", {}, {}, {})
    last: Definition | None = None
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.imports.update(_imported(node, module))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in node.body:
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    source.for_types.update(_imported(inner, module))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last is not None:
            # What a value means, in a string behind it.
            last.text += "\n" + _text_of(node, lines)
        else:
            names = list(_defined(node))
            last = Definition(_text_of(node, lines), *_names_in(node), isinstance(node, ast.ClassDef | ast.FunctionDef))
            source.definitions.update(dict.fromkeys(names, last))
    return source


def _imported(node: ast.Import | ast.ImportFrom, module: str) -> Iterator[tuple[str, External]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            yield bound, External(alias.name if alias.asname else bound, None, bound)
        return
    if node.level:
        raise CannotCollect(f"{module} has a relative import")
    for alias in node.names:
        bound = alias.asname or alias.name
        yield bound, External(str(node.module), alias.name, bound)


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _text_of(node: ast.stmt, lines: Sequence[str]) -> str:
    """The statement with its decorators and the comment right above it."""
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while start and lines[start - 1].startswith("#"):
        start -= 1
    return "\n".join(lines[start : node.end_lineno])


def _names_in(node: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a statement uses when it or its body runs, and those that only its annotations use."""
    used: set[str] = set()
    annotated: set[str] = set()

    def walk(part: ast.AST, into: set[str]) -> None:
        if isinstance(part, ast.Name):
            into.add(part.id)
        elif into is annotated and isinstance(part, ast.Constant) and isinstance(part.value, str):
            walk(ast.parse(part.value, mode="eval"), annotated)
        for name, value in ast.iter_fields(part):
            inside = annotated if name in ("annotation", "returns") else into
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    walk(child, inside)

    walk(node, used)
    return used, annotated - used


def _resolve(module: str, name: str, beside: Mapping[str, str]) -> Name | External | None:
    """Where a module has a name from: a definition to copy, an import to repeat, or None for a builtin."""
    source = read(module)
    if name in source.definitions:
        return Name(module, name)
    found = source.imports.get(name) or source.for_types.get(name)
    if found is None:
        return None
    if found.module.partition(".")[0] not in OWN or found.module in beside:
        return found
    if found.name is None or found.bound != found.name:
        raise CannotCollect(f"{module} imports {found.module} under a name of its own")
    return _resolve(found.module, found.name, beside)


def _closure(roots: Iterable[Name], beside: Mapping[str, str]) -> tuple[set[Name], set[External]]:
    """All that the roots need when they run, and what of their annotations leads to nothing of fairseq's."""
    needed, externals = _reachable(roots, beside)
    _refuse_host(externals)
    pending = deque(needed)
    while pending:
        own = pending.popleft()
        definition = read(own.module).definitions[own.name]
        for name in sorted(definition.annotated):
            found = _resolve(own.module, name, beside)
            if isinstance(found, External) and not _is_host(found):
                externals.add(found)
            elif isinstance(found, Name) and found not in needed:
                more, others = _reachable([found], beside)
                if not any(map(_is_host, others)):
                    pending.extend(more - needed)
                    needed |= more
                    externals |= others
    return needed, externals


def _reachable(roots: Iterable[Name], beside: Mapping[str, str]) -> tuple[set[Name], set[External]]:
    needed, externals, pending = set(roots), set(), deque(roots)
    while pending:
        own = pending.popleft()
        definition = read(own.module).definitions.get(own.name)
        if definition is None:
            raise CannotCollect(f"{own.module} does not define {own.name}")
        for name in definition.used:
            found = _resolve(own.module, name, beside)
            if isinstance(found, External):
                externals.add(found)
            elif found is not None and found not in needed:
                needed.add(found)
                pending.append(found)
    return needed, externals


def _is_host(found: External) -> bool:
    return found.module.partition(".")[0] in _HOST


def _refuse_host(externals: Iterable[External]) -> None:
    for found in sorted(externals, key=str):
        if _is_host(found):
            raise CannotCollect(f"{found.module}.{found.name} is needed, which an exported model does not have")


def _renamed(needed: Iterable[Name], externals: Iterable[External]) -> dict[Name, str]:
    """New names for definitions whose names several modules use."""
    places: dict[str, list[Name | External]] = {}
    for own in needed:
        places.setdefault(own.name, []).append(own)
    for external in externals:
        places.setdefault(external.bound, []).append(external)
    renamed = {}
    for name, several in places.items():
        if len(several) > 1 and sum(isinstance(found, External) for found in several) > 1:
            raise CannotCollect(f"{name} would be several imports: {', '.join(sorted(map(str, several)))}")
        for found in several if len(several) > 1 else ():
            if isinstance(found, Name):
                renamed[found] = f"{name}_of_{found.module.rpartition('.')[2]}"
    taken = places.keys() & set(renamed.values())
    if taken or len(set(renamed.values())) != len(renamed):
        raise CannotCollect(f"names cannot be told apart: {', '.join(sorted(renamed.values()))}")
    return renamed


def _with_new_names(text: str, module: str, renamed: Mapping[Name, str], beside: Mapping[str, str]) -> str:
    """The text of a definition with the new names of what it defines and uses."""
    if not renamed:
        return text
    lines = text.splitlines()
    places: list[tuple[int, int, str, str]] = []
    for node in ast.walk(ast.parse(text)):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "name", None)
        found = _resolve(module, name, beside) if isinstance(name, str) else None
        if isinstance(node, ast.arg) and _resolve(module, node.arg, beside) in renamed:
            raise CannotCollect(f"{module} has an argument with the name of {node.arg}, which needs another")
        if not isinstance(found, Name) or found not in renamed:
            continue
        if isinstance(node, ast.Name):
            places.append((node.lineno, node.col_offset, found.name, renamed[found]))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.col_offset == 0:
            word = "class " if isinstance(node, ast.ClassDef) else "def "
            places.append((node.lineno, len(word), found.name, renamed[found]))
    for line, column, old, new in sorted(places, reverse=True):
        before = lines[line - 1].encode()
        assert before[column:].startswith(old.encode()), (module, line, old)
        lines[line - 1] = (before[:column] + new.encode() + before[column + len(old) :]).decode()
    return "\n".join(lines)


def _in_order(needed: Iterable[Name], roots: Sequence[Name]) -> list[str]:
    """The modules of the definitions, each behind those that it imports, the last root's as late as can be."""
    wanted, order, seen = {own.module for own in needed}, [], set()

    def visit(module: str) -> None:
        if module in seen:
            return
        seen.add(module)
        for found in read(module).imports.values():
            if (
                found.module.partition(".")[0] in OWN
                and found.name in read(found.module).definitions | read(found.module).imports
            ):
                visit(found.module)
        if module in wanted:
            order.append(module)

    for module in [*(root.module for root in roots), *sorted(wanted)]:
        visit(module)
    return order


def _section(module: str, needed: Iterable[Name], renamed: Mapping[Name, str], beside: Mapping[str, str]) -> str:
    source = read(module)
    names = {own.name for own in needed if own.module == module}
    wanted: list[Definition] = []
    for name, definition in source.definitions.items():
        if name in names and not any(definition is one for one in wanted):
            wanted.append(definition)
    path = module.replace(".", "/") + ".py"
    text = "\n".join(["# " + "-" * 118, *(f"# {line}".rstrip() for line in [path, "", *source.docstring.splitlines()])])
    spread = True
    for definition in wanted:
        text += "\n\n\n" if spread or definition.spread else "\n"
        text += _with_new_names(definition.text, module, renamed, beside)
        spread = definition.spread
    return text


def _import_lines(externals: Iterable[External], beside: Mapping[str, str]) -> str:
    """Imports as they are sorted everywhere here: the standard library's, others, those of the files beside."""
    groups: list[list[str]] = [[], [], []]
    whole = {found for found in externals if found.name is None}
    for found in sorted(whole, key=lambda found: found.module):
        line = f"import {found.module}" + (f" as {found.bound}" if found.bound != found.module else "")
        groups[0 if _is_standard(found.module) else 1].append(line)
    by_module: dict[str, list[str]] = {}
    for found in sorted(set(externals) - whole, key=str):
        name = str(found.name) + (f" as {found.bound}" if found.bound != found.name else "")
        by_module.setdefault(found.module, []).append(name)
    for module, names in sorted(by_module.items()):
        place = f".{beside[module]}" if module in beside else module
        group = 2 if module in beside else 0 if _is_standard(module) else 1
        groups[group].append(f"from {place} import {', '.join(sorted(names))}")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
