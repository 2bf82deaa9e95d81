"""One self-contained page of a bundle's graph: kernels with their nodes, times, roofline and memory.

Promises that the page needs no network, and that no name in a bundle can leave the data that it is in. The
page itself is `graph_page.html`; this module computes what it draws.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from agent.bundle.graph import Graph
from agent.bundle.joins import joined, roots_of
from agent.bundle.layer import Layer
from agent.bundle.node import NOP
from agent.bundle.params import index_params
from agent.durable import replacing
from builder.bundles.package import Package
from builder.bundles.profile_report import Report, Row
from builder.errors import OTHER_FOLDER, PackageError

_DATA: Final = "/*data*/null"
_COLOURS: Final = "/*colours*/"
# Of the drawing, in its own units.
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 230, 58, 26, 34
_ROUTE_WIDTH: Final = 16.0
_LONGEST_ROUTE: Final = 64  # ranks; a longer edge runs below nodes, as routes take time and memory
_MOST_PLACES: Final = 50_000  # of all routes: a graph from a stranger may have a million edges
_MOST_SOURCES: Final = 256  # of a join: in a graph from a stranger, each may contain all before it
_SWEEPS: Final = 6  # over the ranks, which untangle edges


@dataclass(frozen=True, slots=True)
class _Node:
    """A call, an input or an output of the model, as the page draws it.

    `id`: its place in the page's list.
    `kind`: `call`, `input` or `output`.
    `title`: the kernel, or the name of the input or output.
    `nodes`, `window`, `reads`, `writes`: those of the call's `Layer`.
    `sources`: ids of the nodes that it reads.
    `flops`, `bytes`: operations of a call, None if unknown, and the size of its arguments.
    `live_bytes`: the memory of values that are alive while it runs, without weights.
    `time_us`: its time, None without a profile.
    `routes`: for each of `sources`, the places between the two through which the edge goes, past other nodes.
    """

    id: int
    kind: str
    title: str
    operators: str
    nodes: Sequence[str]
    window: str
    reads: Sequence[str]
    writes: Sequence[str]
    shapes: str
    sources: Sequence[int]
    flops: float | None
    bytes: int
    live_bytes: int
    time_us: float | None
    x: float = 0.0
    y: float = 0.0
    routes: Sequence[Sequence[tuple[float, float]]] = ()


def write_page(
    package: Package,
    path: str | os.PathLike[str],
    report: Report | None = None,
    other: Report | None = None,
) -> None:
    """Write the page of a bundle's graph.

    Parameters
    ----------
    package
        The bundle.
    path
        The file to write.
    report
        A profile of this bundle, or None for a page without times.
    other
        A profile to compare with, of this bundle or of another build of the model.

    Raises
    ------
    PackageError
        If the file cannot be written, or `report` is one of another bundle.
    FormatError
        If the bundle's graph is damaged.
    """
    manifest = package.manifest
    data = {
        "name": manifest.name,
        "version": manifest.version,
        "target": f"{manifest.target.triple} {manifest.target.cpu}",
        "arena": manifest.resources.arena_bytes,
        "box": [_WIDTH, _HEIGHT],
        "nodes": [asdict(node) for node in _nodes(package, report)],
        "total": None if report is None else report.total_us,
        "stages": [] if report is None else [asdict(stage) for stage in report.stages],
        "other": None if other is None else _compared(other),
    }
    template = (resources.files(__package__) / "graph_page.html").read_text("utf-8")
    colours = (resources.files("builder") / "colours.css").read_text("utf-8")
    # Inside a script, only `<` could begin markup.
    page = template.replace(_COLOURS, colours).replace(_DATA, json.dumps(data).replace("<", "\\u003c"))
    try:
        with replacing(Path(path)) as file:
            file.write(page.encode())
    except OSError as error:
        raise PackageError(f"{path}: cannot be written ({error.strerror})", hint=OTHER_FOLDER) from error


def _compared(report: Report) -> dict[str, Any]:
    """Return another profile: the time of each call by what it computes."""
    calls: dict[str, list[float]] = defaultdict(list)
    for row in report.rows:
        calls[_key(row)].append(row.duration_us)
    return {"total": report.total_us, "calls": calls}


def _key(row: Row) -> str:
    """Return the key by which the page pairs the calls of two profiles; its script builds the same text."""
    nodes = [node for layer in row.layers for node in layer.nodes]
    return f"{','.join(nodes) or row.name}|{row.kind.partition(' ')[0]}"


def _nodes(package: Package, report: Report | None) -> list[_Node]:
    graph = Graph.from_json(package.members["mod.json"])
    weights = {entry.spec.name for entry in index_params(package.members["mod.params"])}
    root = roots_of(graph)
    constant = _constant(graph, root, weights)
    joins = joined(graph, root, constant)
    calls = [
        i
        for i, node in enumerate(graph.nodes)
        if not node.is_null and node.func_name != NOP and graph.node_row_ptr[i] not in constant
    ]
    steps = [i for i in calls if i not in joins.nodes]
    rows: Sequence[Row | None] = [None] * len(steps) if report is None else report.rows
    # Agents of early versions make the calls of joins too.
    names = [row.name for row in rows if row]
    if len(names) == len(calls) > len(steps) and names == [graph.nodes[i].func_name for i in calls]:
        rows = [row for i, row in zip(calls, rows, strict=True) if i not in joins.nodes]
    elif names not in ([], [graph.nodes[i].func_name for i in steps]):
        raise PackageError(
            "expected a profile of this bundle, got one with other kernels",
            hint="make the profile with this bundle: edgebundle profile BUNDLE",
        )
    home = [joins.places[each].owner if each in joins.places else each for each in root]
    live = _live_bytes(graph, home, steps, constant)
    maker: dict[int, tuple[int, ...]] = {}  # of a join in place, those of its parts
    found: list[_Node] = []
    for i, node in enumerate(graph.nodes):
        if node.is_null and node.name not in weights:
            maker[graph.node_row_ptr[i]] = (len(found),)
            shape = "x".join(map(str, graph.shape[graph.node_row_ptr[i]]))
            found.append(_end(len(found), "input", node.name, (), (), (shape,)))
    step = -1
    for i in calls:
        node = graph.nodes[i]
        entries = [graph.entry_id(entry) for entry in node.inputs]
        sources = [each for entry in entries for each in maker.get(root[entry], ())]
        if i in joins.nodes:
            maker[graph.node_row_ptr[i]] = tuple(dict.fromkeys(sources))[-_MOST_SOURCES:]
            continue
        step += 1
        row = rows[step]
        layer = Layer.from_attrs(node.attrs)
        outputs = range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1])
        flops = _number(node.attrs.get("flops"))
        found.append(
            _Node(
                len(found),
                "call",
                node.func_name,
                Row(node.func_name, 0.0, None, "").kind,
                layer.nodes,
                layer.window,
                layer.reads,
                layer.writes,
                ", ".join(
                    f"{graph.dltype[e]}[{', '.join(map(str, graph.shape[e]))}]" for e in (*entries, *outputs)
                ),
                tuple(dict.fromkeys(sources)),
                flops,
                sum(graph.spec(e).nbytes for e in (*entries, *outputs)),
                live[step],
                None if row is None else row.duration_us,
            )
        )
        maker.update(dict.fromkeys(outputs, (found[-1].id,)))
    for head, spec in zip(graph.heads, package.manifest.outputs, strict=False):
        makers = maker.get(root[graph.entry_id(head)], ())
        shape = "x".join(map(str, spec.shape))
        found.append(_end(len(found), "output", spec.name, makers, (shape,), ()))
    return _placed(found)


def _end(
    number: int, kind: str, name: str, sources: Sequence[int], reads: Sequence[str], writes: Sequence[str]
) -> _Node:
    return _Node(number, kind, name, "", (), "", reads, writes, "", sources, None, 0, 0, None)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _constant(graph: Graph, root: Sequence[int], weights: set[str]) -> set[int]:
    """Return the entries that depend only on weights: they are computed at load."""
    constant: set[int] = set()
    for i, node in enumerate(graph.nodes):
        first = graph.node_row_ptr[i]
        if node.is_null:
            known = node.name in weights
        else:
            known = all(root[graph.entry_id(entry)] in constant for entry in node.inputs)
        if known:
            constant.update(range(first, first + node.num_outputs))
    return constant


def _live_bytes(graph: Graph, home: Sequence[int], steps: Sequence[int], constant: set[int]) -> list[int]:
    """Return the size of the values that are alive while each step runs.

    `home` has for each entry the one in whose memory it is.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for step, i in enumerate(steps):
        for entry in (graph.entry_id(entry) for entry in graph.nodes[i].inputs):
            last[home[entry]] = step
            first.setdefault(home[entry], 0)
        for entry in range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1]):
            first.setdefault(home[entry], step)
            last[home[entry]] = step
    last.update({home[graph.entry_id(head)]: len(steps) for head in graph.heads})
    change = [0] * (len(steps) + 1)
    for entry, start in first.items():
        if entry not in constant:
            change[start] += graph.spec(entry).nbytes
            change[min(last[entry] + 1, len(steps))] -= graph.spec(entry).nbytes
    alive, total = [], 0
    for each in change[:-1]:
        total += each
        alive.append(total)
    return alive


def _placed(nodes: Sequence[_Node]) -> list[_Node]:
    """Return the nodes with places: a rank below all that they read, near to what they are connected with.

    An edge over several ranks takes a narrow place in each of them, so that it does not run below nodes
    (Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical System Structures", 1981).
    """
    rank: list[int] = []
    for node in nodes:
        rank.append(1 + max((rank[source] for source in node.sources), default=-1))
    deepest = max(rank, default=0)
    rank = [deepest if node.kind == "output" else own for node, own in zip(nodes, rank, strict=True)]
    above: list[list[int]] = [[] for _ in nodes]
    below: list[list[int]] = [[] for _ in nodes]
    routes: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        for source in node.sources:
            between = range(rank[source] + 1, rank[node.id])
            is_routed = len(between) <= _LONGEST_ROUTE and len(rank) < len(nodes) + _MOST_PLACES
            passing = list(range(len(rank), len(rank) + len(between))) if is_routed else []
            routes[source, node.id] = passing
            rank.extend(between if passing else ())
            above.extend([] for _ in passing)
            below.extend([] for _ in passing)
            chain = [source, *passing, node.id]
            for upper, lower in pairwise(chain):
                above[lower].append(upper)
                below[upper].append(lower)
    ranks: dict[int, list[int]] = defaultdict(list)
    for i, level in enumerate(rank):
        ranks[level].append(i)
    width = [_WIDTH + _GAP_X if i < len(nodes) else _ROUTE_WIDTH for i in range(len(rank))]
    x = [0.0] * len(rank)
    for sweep in range(_SWEEPS):
        near = above if sweep % 2 == 0 else below
        for level in sorted(ranks, reverse=near is below):
            wanted = {i: sum(x[j] for j in near[i]) / len(near[i]) if near[i] else x[i] for i in ranks[level]}
            ranks[level].sort(key=wanted.__getitem__)
            _without_overlap(ranks[level], wanted, width, x)
    return [
        replace(
            node,
            x=round(x[node.id] - _WIDTH / 2, 1),
            y=_top(rank[node.id]),
            routes=[
                [(round(x[i], 1), _top(rank[i])) for i in routes[source, node.id]] for source in node.sources
            ],
        )
        for node in nodes
    ]


def _top(rank: int) -> float:
    return float(rank * (_HEIGHT + _GAP_Y))


def _without_overlap(
    ids: Sequence[int], wanted: Mapping[int, float], width: Sequence[float], x: list[float]
) -> None:
    """Place a rank's nodes where they want to be, in order, moved apart, with the same centre."""
    end = -math.inf
    for i in ids:
        x[i] = max(wanted[i], end + width[i] / 2)
        end = x[i] + width[i] / 2
    shift = sum(x[i] - wanted[i] for i in ids) / len(ids)
    for i in ids:
        x[i] -= shift
