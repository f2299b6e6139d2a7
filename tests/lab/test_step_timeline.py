"""Kernels of replays and the parts they belong to, on events written by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specengine.core.errors import SpecEngineError
from specengine.lab.step.attribution import attribute, calls_of, nodes_in_order
from specengine.lab.step.timeline import Node, nodes_of, read_trace, rounds_of, trace_of

# A round of one draft step, then verification by two layers, as a marked run sees it.
ROUND = [
    ("_begin_round_kernel", "begin"),
    ("gemm", "draft head"),
    ("_row_argmax", "draft head"),
    ("Memcpy", "begin"),
    ("_layer", "verify"),
    ("_layer", "verify"),
    ("gemm", "verify head"),
    ("_row_argmax", "verify head"),
    ("_accept_chain_kernel", "accept"),
    ("_layer", "observe"),
]
NODES = [Node(*pair) for pair in ROUND]
PLAIN = [node for node in NODES if node.part not in ("draft head", "observe")]


def event(name: str, start: float, length: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


def replay(nodes: Sequence[Node], start: float, *, length: float = 2.0) -> list[dict[str, Any]]:
    """Kernels of `length`, one every 3 microseconds."""
    return [event(node.name, start + 3 * i, length) for i, node in enumerate(nodes)]


def test_marked_round_names_the_parts(tmp_path: Path) -> None:
    kernels = replay(NODES, 100.0)
    marks = [
        event("draft", 102.5, 7.0, "user_annotation"),
        event("draft head", 102.8, 6.0, "user_annotation"),
        event("verify", 111.5, 12.6, "user_annotation"),
        event("verify head", 117.5, 6.0, "user_annotation"),
        event("observe", 126.5, 5.0, "user_annotation"),
    ]
    others = [
        {"ph": "M", "name": "process_name"},
        event("aten::mm", 103.0, 1.0, "cpu_op"),
        event("draft", 102.5, 7.0, "gpu_user_annotation"),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*others, *kernels[::-1], *marks]}))
    assert nodes_of(read_trace(file)) == NODES


def test_no_kernels_is_an_error() -> None:
    with pytest.raises(SpecEngineError, match="saw no kernels"):
        nodes_of(trace_of([]))


def test_replays_are_cut_into_rounds() -> None:
    prefill = [event("_prefill", 0.0, 9.0), event("gemm", 12.0, 3.0)]
    copy = event("Memcpy HtoD (Pinned -> Device)", 71.0, 1.0, "gpu_memcpy")
    events = [
        *prefill,
        *replay(NODES, 20.0),
        event("_prefill", 55.0, 9.0),  # of another request
        *replay(NODES, 70.0 + 4.0),
        event("Memcpy HtoD", 105.0, 1.0, "gpu_memcpy"),
        *replay(NODES, 110.0),
    ]
    found = rounds_of(trace_of([*events, copy]), [NODES])
    assert [one.kernels[0].start for one in found] == [20.0, 74.0, 110.0]
    assert [one.next_start for one in found] == [None, 110.0, None]


def test_copies_are_called_differently_in_graphs() -> None:
    graph = [Node(node.name.replace("Memcpy", "Memcpy DtoD (graph)"), node.part) for node in NODES]
    assert len(rounds_of(trace_of([*replay(graph, 0), *replay(graph, 50)]), [NODES])) == 2


def test_graphs_of_several_depths() -> None:
    events = [*replay(NODES, 0), *replay(PLAIN, 40), *replay(NODES, 80), *replay(NODES, 120)]
    found = rounds_of(trace_of([*events, *replay(PLAIN, 160)]), [PLAIN, NODES])
    kinds = [list(one.nodes) for one in found]
    assert kinds == [NODES, PLAIN, NODES, NODES, PLAIN]
    assert attribute(found).rounds == 3, "those of the usual depth"


def test_unknown_kernel_belongs_to_the_part_before_it() -> None:
    more = [*NODES[:6], Node("_stranger", ""), *NODES[6:]]
    found = rounds_of(trace_of([*replay(more, 0), *replay(more, 50)]), [NODES])
    assert [[node.part for node in one.nodes] for one in found] == [
        [node.part for node in NODES[:6]] + ["verify"] + [node.part for node in NODES[6:]]
    ] * 2
    assert found[0].next_start == 50


def test_other_kernels_are_no_round() -> None:
    other = [Node("_begin_round_kernel", ""), *[Node("_other", "")] * 9]
    assert rounds_of(trace_of(replay(other, 0)), [NODES]) == []
    with pytest.raises(SpecEngineError, match="no round of the profile"):
        attribute([])


def test_rounds_need_a_name_that_comes_once() -> None:
    with pytest.raises(SpecEngineError, match="cannot be told apart"):
        rounds_of(trace_of([]), [[Node("a", ""), Node("a", "")]])


def test_two_branches_run_in_any_order() -> None:
    """Kernels of a shared expert before those of routing, between them, or beside them."""
    routed = [(name, "verify") for name in ("_route", "_sort", "gemm", "_sum")]
    shared = [(name, "verify") for name in ("_gate_up", "_act", "_down", "_weigh")]
    mixed = [one for pair in zip(shared, routed, strict=True) for one in pair]

    def nodes_with(layer: list[tuple[str, str]]) -> list[Node]:
        return [Node(*one) for one in [*ROUND[:4], *layer * 4, *ROUND[8:]]]

    nodes, other = nodes_with(shared + routed), nodes_with(mixed)
    events = [*replay(nodes, 0), *replay(other, 150), *replay(other, 300), *replay(nodes, 450)]
    lengths = {"_gate_up": 4.0, "_route": 1.0}  # the next one begins within the first
    for one in events:
        one["dur"] = lengths.get(one["name"], one["dur"])
    found = rounds_of(trace_of(events), [nodes])
    assert [one.nodes for one in found] == [tuple(nodes)] * 4
    assert [[span.name for span in one.kernels] for one in found] == [
        [node.name for node in nodes]
    ] * 4
    device = attribute(found[1:3])
    assert device.period == pytest.approx(150.0)
    busy = {node.name: node.busy for node in device.nodes}
    assert (busy["_gate_up"], busy["_route"], busy["_act"]) == (4.0, 0.0, 2.0)
    device = attribute(found[:1])
    busy = {node.name: node.busy for node in device.nodes}
    assert (busy["_gate_up"], busy["_route"], busy["_act"]) == (4.0, 1.0, 1.0)


def test_a_marker_in_the_middle() -> None:
    nodes = [Node("gemm", "draft"), Node("_once", "verify"), Node("gemm", "verify")]
    found = rounds_of(trace_of([*replay(nodes, 0), *replay(nodes, 20)]), [nodes])
    assert [one.kernels[0].start for one in found] == [0, 20]


def test_time_is_attributed() -> None:
    events = [kernel for i in range(8) for kernel in replay(NODES, 40.0 * i)]
    device = attribute(rounds_of(trace_of(events), [NODES]))
    assert device.rounds == 7, "the last is followed by none"
    assert device.period == pytest.approx(40.0)
    assert device.between == pytest.approx(40.0 - 9 * 3 - 2)
    assert nodes_in_order(device.nodes) == [
        *["begin", "draft head", "begin", "verify", "verify head", "accept", "observe"]
    ]
    busy = {part: sum(node.busy for node in nodes) for part, nodes in device.parts.items()}
    idle = {part: sum(node.idle for node in nodes) for part, nodes in device.parts.items()}
    assert busy == {
        "begin": 4.0,
        "draft head": 4.0,
        "verify": 4.0,
        "verify head": 4.0,
        "accept": 2.0,
        "observe": 2.0,
    }
    assert idle["begin"] == 1.0, "nothing comes before the first kernel of a round"
    assert idle["verify"] == 2.0


def test_kernels_that_overlap_count_once() -> None:
    events = [kernel for i in range(4) for kernel in replay(NODES, 40.0 * i, length=4.0)]
    device = attribute(rounds_of(trace_of(events), [NODES]))
    assert sum(node.busy for node in device.nodes) == pytest.approx(9 * 3 + 4)
    assert sum(node.idle for node in device.nodes) == 0
    assert device.period == pytest.approx(40.0)


def test_rare_delays_do_not_count() -> None:
    starts = [0.0, 40.0, 80.0, 5120.0, 5160.0, 5200.0, 5240.0]
    events = [kernel for start in starts for kernel in replay(NODES, start)]
    assert attribute(rounds_of(trace_of(events), [NODES])).period == pytest.approx(40.0)


def test_calls_of_the_driver() -> None:
    events: list[dict[str, Any]] = []
    for i in range(5):
        events += replay(NODES, 40.0 * i)
        events.append(event("cudaGraphLaunch", 40.0 * i + 1, 3.0, "cuda_runtime"))
        if i % 2 == 0:
            events.append(event("cuEventRecord", 40.0 * i + 5, 1.0, "cuda_driver"))
    trace = trace_of([*events, event("cudaMalloc", 900.0, 1.0, "cuda_runtime")])
    found = rounds_of(trace, [NODES])
    assert calls_of(trace, found) == {"cudaGraphLaunch": 1.0, "cuEventRecord": 0.5}
    assert calls_of(trace, found[:1]) == {}
