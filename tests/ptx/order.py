"""In which order basic blocks run, so that lanes that parted meet again as early as they can.

The lanes at the earliest block run first. In a weak topological order (Bourdoncle 1993) a loop's
blocks are neighbours and what follows the loop comes after all of them: nobody overtakes those
still inside, wherever the compiler put its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable


def ranks(successors: list[list[int]]) -> list[int]:
    """The rank of each block of a program that begins at block 0; those that cannot be reached come
    last."""
    order = _order(range(len(successors)), [0], successors)
    order += sorted(set(range(len(successors))) - set(order))
    place = [0] * len(successors)
    for rank, number in enumerate(order):
        place[number] = rank
    return place


def _order(nodes: Iterable[int], roots: Iterable[int], successors: list[list[int]]) -> list[int]:
    inside = set(nodes)
    order: list[int] = []
    for component in reversed(_components(inside, roots, successors)):
        head = component[0]
        order.append(head)
        if len(component) > 1:
            body = set(component) - {head}
            order += _order(body, [n for n in successors[head] if n in body], successors)
    return order


def _components(inside: set[int], roots: Iterable[int], successors: list[list[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan 1972), each after those it leads to, with the node it
    was entered by first."""
    found: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    closed: set[int] = set()
    components = []
    for root in roots:
        if root in found:
            continue
        found[root] = low[root] = len(found)
        stack.append(root)
        path = [(root, iter(successors[root]))]
        while path:
            node, rest = path[-1]
            child = next(rest, None)
            if child is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == found[node]:
                    begin = stack.index(node)
                    components.append(stack[begin:])
                    closed.update(stack[begin:])
                    del stack[begin:]
            elif child in inside and child not in found:
                found[child] = low[child] = len(found)
                stack.append(child)
                path.append((child, iter(successors[child])))
            elif child in inside and child not in closed:
                low[node] = min(low[node], found[child])
    return components
