"""The way from the public call to the kernel's loop: definitions that tools can follow, in few
files."""

from __future__ import annotations

import ast
from collections import deque
from functools import cache

import pytest
from test_laws import MODULES

Definition = tuple[str, str]  # module, name

FIRST, LAST = ("numba_prefix.front.encoder", "prefix_encoder"), ("numba_prefix.cpu.kernel.work_loop", "make_drain")
MOST_FILES = 6


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def defined(module: str) -> dict[str, ast.stmt]:
    return {node.name: node for node in tree(module).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@cache
def imported(module: str) -> dict[str, Definition]:
    """Imports from the package, anywhere in the file: local name -> definition."""
    found = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


def go_to_definition(module: str, name: str) -> Definition | None:
    """Where a name in a file is defined; None for a module, a variable or another package's."""
    if name in defined(module):
        return module, name
    found = imported(module).get(name)
    return go_to_definition(*found) if found is not None and found != (module, name) else None


def followed(definition: Definition) -> set[Definition]:
    """The definitions that this one names."""
    module, name = definition
    names = {node.id for node in ast.walk(defined(module)[name]) if isinstance(node, ast.Name)}
    return {found for other in names if (found := go_to_definition(module, other)) not in (None, definition)}


def way(first: Definition, last: Definition) -> list[Definition]:
    """The one through the fewest files; [] if there is none."""
    waiting, known = deque([[first]]), set[Definition]()
    while waiting:
        so_far = waiting.popleft()
        module, _ = here = so_far[-1]
        if here == last:
            return so_far
        if here in known:
            continue
        known.add(here)
        for definition in sorted(followed(here)):
            add = waiting.appendleft if definition[0] == module else waiting.append
            add([*so_far, definition])
    return []


def test_the_kernel_is_six_files_away() -> None:
    """Through the target's class, not around it."""
    found = way(FIRST, LAST)
    assert ("numba_prefix.cpu.target", "CpuTarget") in found
    files = list(dict.fromkeys(module for module, _ in found))
    assert len(files) <= MOST_FILES, files


@pytest.mark.parametrize("target", ["cuda.target.CudaTarget", "front.reference_target.ReferenceTarget"])
def test_every_target_is_found(target: str) -> None:
    module, _, name = f"numba_prefix.{target}".rpartition(".")
    assert way(FIRST, (module, name))


def test_nothing_is_untyped_at_the_seam() -> None:
    """A target's class and its methods are known by type; the arrays and streams of callers alone
    are Any."""
    assert all(getattr(node, "id", "") != "Any" for node in ast.walk(tree("numba_prefix.front.targets")))
    target = defined("numba_prefix.planning.target")["Target"]
    untyped = {
        (method.name, argument.arg)
        for method in ast.walk(target)
        if isinstance(method, ast.FunctionDef)
        for argument in [*method.args.args[1:], ast.arg("returned", method.returns)]
        if argument.annotation is None or "Any" in ast.dump(argument.annotation)
    }
    assert untyped == {("allocate", "returned"), ("bind", "lse"), ("run", "workspace"), ("run", "stream")}
