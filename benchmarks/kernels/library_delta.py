"""The gated delta rule by fla-core's Triton kernels beside ours, of Qwen3-Next's shape, on a GPU.

    python -m benchmarks.kernels.library_delta [--kinds decode prompt] [--json FILE]

What is timed of each way, with the causal convolution before the rule:

decode: a token a request. verify: several, after which states are as before. commit: moving states
on by all of these, after a verification; ours takes all layers in one launch. tree: a
verification of a binary tree. prompt: requests without earlier text.

fla-core has no slots, so that its states lie side by side here, in the order of the batch; "in
slots" gathers them, and writes them back. It keeps no states of nodes: it commits by running the
rule again, and verifies a tree as a sequence a leaf, each from a copy of the state. "rule alone":
what the convolution gives stands ready.

Each way is first compared with float64 (5% of the largest value: fla-core rounds states between
chunks), then timed in graphs over several layers, in turns. fla-core chooses among its
configurations anew for each row. Where it is missing, or fails, that is said and it is left out.
All kinds replace their table. Takes about a minute on an H200 with 16 cores, of which half
compiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import report

from benchmarks.kernels import delta_rule as bench
from benchmarks.kernels.delta_forms import captured
from benchmarks.kernels.experts import copy_speed
from benchmarks.kernels.fp8_products import in_turns
from specengine.kernels.delta import delta_rule
from specengine.kernels.delta.delta_rule_ref import NORM_EPS, parents_of
from specengine.kernels.delta.types import DeltaInputs, PromptBatch, StatePaths
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

DTYPE = torch.bfloat16
MOST_ERROR = 0.05  # beside float64, of the largest value
TITLE = "The gated delta rule by fla-core beside ours"
REQUESTS = (1, 8, 64, 256)
CHECKED = 5  # requests

# Outputs [T, M, E], and the memory behind the tokens where it is moved on, [N, M, K, E].
Result = tuple[Tensor | None, Tensor | None]


class Work:
    """Tokens of requests before several layers: `width` of each. The states of requests fill the
    slots from 1 on, in this order."""

    def __init__(
        self, requests: int, width: int, layers: int, *, is_tree: bool = False, is_new: bool = False
    ) -> None:
        self.requests, self.width, self.layers = requests, width, layers
        self.shape = bench.SHAPE
        self.pool = bench.make_pool(requests, 1 if is_new else width, layers, DTYPE)
        self.weights = bench.make_weights(DTYPE)
        self.given = bench.make_inputs(requests * width, DTYPE)
        # fla-core copies what is not contiguous.
        self.write, self.decay = (
            one.contiguous() for one in (self.given.write_TM, self.given.decay_TM)
        )
        self.nodes = bench.make_nodes(requests, width, is_tree)

    def memory(self, layer: int) -> Tensor:
        """float32 [N, M, K, E], what the pool holds."""
        return self.pool.state(layer).memory[1:]

    def inputs(self, layer: int) -> Tensor:
        """[N, C, conv_width], a copy of the convolution's last inputs as fla-core keeps them: the
        first is never read."""
        return F.pad(self.pool.state(layer).inputs[1:].transpose(1, 2), (1, 0)).contiguous()

    @property
    def states(self) -> list[Any]:
        return [self.pool.state(layer) for layer in range(self.layers)]

    @property
    def updates(self) -> list[Any]:
        return [self.pool.updates(layer) for layer in range(self.layers)]


@dataclass(frozen=True)
class Sequences:
    """Rows of tokens one after the other, for fla-core. bounds: int64 [S + 1]. chunks: the number
    of each sequence, and 0, as none is longer than a chunk, int64 [S, 2]."""

    bounds: Tensor
    chunks: Tensor

    @classmethod
    def of(cls, bounds: Tensor) -> Sequences:
        order = torch.arange(len(bounds) - 1, device=bounds.device)
        return cls(bounds, torch.stack([order, torch.zeros_like(order)], 1))


Way = Callable[[Work], Callable[[int], Result]]  # makes ready; then runs a layer


def our_decode(work: Work) -> Callable[[int], Result]:
    def run(layer: int) -> Result:
        state, updates = work.pool.state(layer), work.pool.updates(layer)
        given = work.given, work.weights, state, updates, work.nodes, work.shape
        return delta_rule.decode(*given), work.memory(layer)

    return run


def our_verify(work: Work) -> Callable[[int], Result]:
    def run(layer: int) -> Result:
        state, updates = work.pool.state(layer), work.pool.updates(layer)
        given = work.given, work.weights, state, updates, work.nodes, work.shape
        return delta_rule.verify(*given), None

    return run


def our_commit(work: Work) -> Callable[[int], Result]:
    verify, nodes = our_verify(work), work.nodes
    for layer in range(work.layers):
        verify(layer)
    accepted = torch.full_like(nodes.rows_B, work.width - 1)
    paths = StatePaths(nodes.rows_B, nodes.starts[:-1], accepted, None, work.width)

    def run(layer: int) -> Result:
        if layer == 0:  # of all layers
            delta_rule.keep(work.states, work.updates, paths, work.shape)
        return None, work.memory(layer)

    return run


def our_prompt(work: Work) -> Callable[[int], Result]:
    lens = [work.width] * work.requests
    batch = PromptBatch(work.nodes.rows_B, lens, [0] * work.requests)
    assert batch.places.num_saves == 0  # sent before anything is captured
    assert len(batch.chunks.table)

    def run(layer: int) -> Result:
        state = work.pool.state(layer)
        out = delta_rule.extend(work.given, work.weights, state, batch, work.shape)
        return out, work.memory(layer)

    return run


@cache
def library() -> SimpleNamespace:
    """fla-core's functions."""
    rule = import_module("fla.ops.gated_delta_rule")
    convolution = import_module("fla.modules.causal_conv1d")
    return SimpleNamespace(
        recurrent=rule.fused_recurrent_gated_delta_rule,
        chunk=rule.chunk_gated_delta_rule,
        convolve=convolution.causal_conv1d,
        convolve_token=convolution.causal_conv1d_update,
        keep_inputs=convolution.causal_conv1d_update_states,
    )


def parts_of(work: Work, mixed: Tensor) -> tuple[Tensor, ...]:
    """[..., C] -> queries, keys [..., G, K] and values [..., M, E]."""
    shape = work.shape
    sizes = [shape.key_size, shape.key_size, shape.value_size]
    return heads_of(work, mixed.split(sizes, -1))


def heads_of(work: Work, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    shape = work.shape
    heads = [(shape.num_key_heads, shape.key_dim)] * 2 + [(shape.num_heads, shape.value_dim)]
    return tuple(one.unflatten(-1, size) for one, size in zip(parts, heads, strict=True))


def ruled(
    run: Callable[..., Any], work: Work, parts: tuple[Tensor, ...], gates: list[Tensor], **more: Any
) -> tuple[Tensor, Tensor | None]:
    """gates: what is written, and what is kept, before their activations."""
    out, memory = run(
        *parts,
        g=gates[1],
        beta=gates[0],
        A_log=work.weights.decay_log_M,
        dt_bias=work.weights.time_bias_M,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **more,
    )
    return out, memory


def their_decode(
    work: Work, in_slots: bool = False, alone: bool = False
) -> Callable[[int], Result]:
    fla = library()
    inputs = [work.inputs(layer) for layer in range(work.layers)]
    gates = [one[:, None] for one in (work.write, work.decay)]

    def convolved(layer: int) -> tuple[Tensor, ...]:
        mixed, weight = work.given.mixed_TC, work.weights.conv_CW
        out, _ = fla.convolve_token(mixed, inputs[layer], weight=weight, activation="silu")
        return parts_of(work, out[:, None])

    ready = [one.contiguous() for one in convolved(0)] if alone else None
    rows = work.nodes.rows_B

    def run(layer: int) -> Result:
        parts = convolved(layer) if ready is None else tuple(ready)
        held = work.pool.state(layer).memory
        memory = held[rows] if in_slots else held[1:]
        more = {"initial_state": memory, "output_final_state": True}
        out, after = ruled(fla.recurrent, work, parts, gates, **more)
        if in_slots:
            assert after is not None
            held.index_copy_(0, rows, after)
        return out.flatten(0, 1), after

    return run


def chain_parts(work: Work, held: Sequences, mixed: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    """What the rule reads of sequences that follow the inputs: each [1, T, heads, size]."""
    out, _ = library().convolve(
        mixed[None],
        work.weights.conv_CW,
        initial_state=inputs,
        activation="silu",
        cu_seqlens=held.bounds,
        chunk_indices=held.chunks,
    )
    return parts_of(work, out)


def their_verify(work: Work, alone: bool = False) -> Callable[[int], Result]:
    fla, held = library(), Sequences.of(work.nodes.starts)
    inputs = [work.inputs(layer) for layer in range(work.layers)]
    gates = [work.write[None], work.decay[None]]
    convolved = partial(chain_parts, work, held, work.given.mixed_TC)
    ready = [one.contiguous() for one in convolved(inputs[0])] if alone else None

    def run(layer: int) -> Result:
        parts = convolved(inputs[layer]) if ready is None else tuple(ready)
        more = {"initial_state": work.memory(layer), "cu_seqlens": held.bounds}
        return ruled(fla.recurrent, work, parts, gates, **more)[0][0], None

    return run


def their_commit(work: Work) -> Callable[[int], Result]:
    """The rule again, from what the convolution gave the verification."""
    fla, held = library(), Sequences.of(work.nodes.starts)
    inputs = [work.inputs(layer) for layer in range(work.layers)]
    gates = [work.write[None], work.decay[None]]
    mixed, width = work.given.mixed_TC, work.shape.conv_width
    kept = [
        tuple(part.contiguous() for part in chain_parts(work, held, mixed, one)) for one in inputs
    ]

    def run(layer: int) -> Result:
        fla.keep_inputs(mixed[None], width, initial_state=inputs[layer], cu_seqlens=held.bounds)
        more = {"initial_state": work.memory(layer), "cu_seqlens": held.bounds}
        _, after = ruled(fla.recurrent, work, kept[layer], gates, output_final_state=True, **more)
        return None, after

    return run


@dataclass(frozen=True)
class Leaves:
    """A tree's paths, each a sequence from the root on. rows: the node of each token. firsts: of
    each node one token that is this node's, int64 [nodes]."""

    rows: Tensor
    bounds: Tensor
    paths: int  # of a request
    firsts: Tensor

    @classmethod
    def of(cls, work: Work) -> Leaves:
        """Every request has the tree of the first."""
        parents = parents_of(work.nodes)[0].tolist()
        paths = [path_to(node, parents) for node in range(work.width) if node not in set(parents)]
        rows, bounds, places = list[int](), [0], dict[int, int]()
        for request, path in product(range(work.requests), paths):
            for node in path:
                row = request * work.width + node
                places.setdefault(row, len(rows))
                rows.append(row)
            bounds.append(len(rows))
        firsts = [places[row] for row in range(work.requests * work.width)]
        made = (torch.tensor(one, device=bench.CUDA) for one in (rows, bounds, firsts))
        rows_made, bounds_made, firsts_made = made
        return cls(rows_made, bounds_made, len(paths), firsts_made)


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to this one."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def their_tree(work: Work) -> Callable[[int], Result]:
    fla, leaves = library(), Leaves.of(work)
    held = Sequences.of(leaves.bounds)
    inputs = [work.inputs(layer) for layer in range(work.layers)]

    def run(layer: int) -> Result:
        again = inputs[layer].repeat_interleave(leaves.paths, 0)
        mixed = work.given.mixed_TC[leaves.rows]
        parts = chain_parts(work, held, mixed, again)
        gates = [one[leaves.rows][None] for one in (work.write, work.decay)]
        memory = work.memory(layer).repeat_interleave(leaves.paths, 0)
        more = {"initial_state": memory, "cu_seqlens": held.bounds}
        out, _ = ruled(fla.recurrent, work, parts, gates, **more)
        return out[0, leaves.firsts], None

    return run


def their_prompt(work: Work, alone: bool = False) -> Callable[[int], Result]:
    """Queries, keys and values in a convolution each: the rule would copy parts of one."""
    fla, shape, lens = library(), work.shape, (work.requests, work.width)
    sizes = [shape.key_size, shape.key_size, shape.value_size]
    mixed = work.given.mixed_TC.unflatten(0, lens).split(sizes, -1)
    convolutions = work.weights.conv_CW.split(sizes)
    gates = [one.unflatten(0, lens) for one in (work.write, work.decay)]

    def convolved() -> tuple[Tensor, ...]:
        pairs = zip(mixed, convolutions, strict=True)
        more = {"output_final_state": True, "activation": "silu"}
        return heads_of(work, tuple(fla.convolve(x, weight, **more)[0] for x, weight in pairs))

    ready = convolved() if alone else None

    def run(layer: int) -> Result:
        parts = convolved() if ready is None else ready
        out, after = ruled(fla.chunk, work, parts, gates, output_final_state=True)
        return out.flatten(0, 1), after

    return run


@dataclass(frozen=True)
class Kind:
    ways: dict[str, Way]
    widths: tuple[int, ...]
    requests: tuple[int, ...] = REQUESTS
    checked: int = 0  # tokens of a request that are compared; 0: as many as are timed
    moves: float = 1  # how often a state is read or written at least
    is_tree: bool = False
    is_new: bool = False

    def work(self, requests: int, width: int, layers: int) -> Work:
        return Work(requests, width, layers, is_tree=self.is_tree, is_new=self.is_new)


OURS, THEIRS, ALONE, SLOTS = "ours", "fla-core", "its rule alone", "fla-core, in slots"
COLUMNS = (OURS, THEIRS, ALONE, SLOTS)
KINDS = {
    "decode": Kind(
        {
            OURS: our_decode,
            THEIRS: their_decode,
            ALONE: partial(their_decode, alone=True),
            SLOTS: partial(their_decode, in_slots=True),
        },
        (1,),
        moves=2,
    ),
    "verify": Kind(
        {OURS: our_verify, THEIRS: their_verify, ALONE: partial(their_verify, alone=True)},
        (2, 4, 8),
    ),
    "commit": Kind({OURS: our_commit, THEIRS: their_commit}, (2, 4, 8), moves=2),
    "tree": Kind({OURS: our_verify, THEIRS: their_tree}, (8,), is_tree=True),
    "prompt": Kind(
        {OURS: our_prompt, THEIRS: their_prompt, ALONE: partial(their_prompt, alone=True)},
        (2048, 8192),
        (1, 8),
        checked=150,
        is_new=True,
    ),
}


def exact(
    given: DeltaInputs, weights: Any, inputs: Tensor, memory: Tensor, width: int, shape: Any
) -> tuple[Tensor, Tensor]:
    """In float64: tokens of `width` to a request, behind inputs [N, conv_width - 1, C] -> outputs
    [N, width, M, E] and the memory behind them."""
    lens = len(memory), width
    line = torch.cat([inputs.double(), given.mixed_TC.double().unflatten(0, lens)], 1)
    windows = line.unfold(1, shape.conv_width, 1)
    mixed = F.silu((windows * weights.conv_CW.double()).sum(-1))
    q, k, v = mixed.split([shape.key_size, shape.key_size, shape.value_size], -1)
    q, k = (one.unflatten(-1, (-1, shape.key_dim)) for one in (q, k))
    q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + NORM_EPS) for one in (q, k))
    q, k = (one.repeat_interleave(shape.group, 2) for one in (q * shape.key_dim**-0.5, k))
    v = v.unflatten(-1, (-1, shape.value_dim))
    write = given.write_TM.double().unflatten(0, lens).sigmoid()
    rate, bias = weights.decay_log_M.double().exp(), weights.time_bias_M.double()
    decay = (-rate * F.softplus(given.decay_TM.double().unflatten(0, lens) + bias)).exp()
    memory, outs = memory.double(), list[Tensor]()
    for place in range(width):
        memory = memory * decay[:, place, :, None, None]
        read = (memory * k[:, place, :, :, None]).sum(-2)
        delta = write[:, place, :, None] * (v[:, place] - read)
        memory = memory + k[:, place, :, :, None] * delta[:, :, None]
        outs.append((memory * q[:, place, :, :, None]).sum(-2))
    return torch.stack(outs, 1), memory


def expected(kind: Kind, work: Work) -> tuple[Tensor, Tensor]:
    """Outputs [T, M, E] and memory [N, M, K, E] of the first layer, in float64."""
    state = work.pool.state(0)
    before = state.inputs[1:].clone(), state.memory[1:].clone()
    if kind.is_new:
        before = torch.zeros_like(before[0]), torch.zeros_like(before[1])
    given = work.given
    if not kind.is_tree:
        out, memory = exact(given, work.weights, *before, work.width, work.shape)
        return out.flatten(0, 1), memory
    parents, outs = parents_of(work.nodes)[0].tolist(), list[Tensor]()
    for node in range(work.width):
        path = path_to(node, parents)
        parts = (
            one.unflatten(0, (-1, work.width))[:, path].flatten(0, 1)
            for one in (given.mixed_TC, given.write_TM, given.decay_TM)
        )
        out, memory = exact(DeltaInputs(*parts), work.weights, *before, len(path), work.shape)
        outs.append(out[:, -1])
    return torch.stack(outs, 1).flatten(0, 1), memory


def error_of(kind: Kind, way: Way, width: int) -> float:
    """The largest of outputs and memory beside float64, of its largest value."""
    work = kind.work(CHECKED, width, 1)
    truth = expected(kind, work)
    errors = [
        float((one.double() - true).abs().max() / true.abs().max())
        for one, true in zip(way(work)(0), truth, strict=True)
        if one is not None
    ]
    return max(errors)


def usable(name: str, kind: Kind) -> dict[str, Way]:
    """Those that run and are right; says what came of each."""
    ways = dict[str, Way]()
    for told, way in kind.ways.items():
        try:
            with tuned_quickly():
                error = max(error_of(kind, way, kind.checked or width) for width in kind.widths)
        except Exception as problem:
            found = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:200]}"
        else:
            found = f"error {error:.1e}"
            if error < MOST_ERROR:
                ways[told] = way
        print(f"{name:>7} {told:>18}: {found}", flush=True)
    return ways


def tuners() -> list[Any]:
    """fla-core's kernels that choose among configurations."""
    with suppress(Exception):  # what fails is said when it is compared
        library()
    from triton.runtime.autotuner import Autotuner, Heuristics

    found = dict[int, Any]()
    modules = [one for name, one in sys.modules.items() if name.partition(".")[0] == "fla"]
    for kernel in [one for module in modules for one in vars(module).values()]:
        while isinstance(kernel, Heuristics):
            kernel = kernel.fn
        if isinstance(kernel, Autotuner):
            found[id(kernel)] = kernel
    return list(found.values())


@contextmanager
def tuned_by(time: Callable[..., list[float]]) -> Iterator[None]:
    """Within it fla-core's kernels choose their configurations anew, by `time`."""
    kept = tuners()
    for one in kept:
        one.cache.clear()
        one.cache_results = False
        one.do_bench = time
    try:
        yield
    finally:
        for one in kept:
            one.cache.clear()


def tuned_quickly() -> Any:
    from triton.testing import do_bench

    return tuned_by(partial(do_bench, warmup=1, rep=3))


def asked(kernel: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
    kernel()
    return [1.0] * len(quantiles)


def compile_all(kinds: dict[str, Kind]) -> None:
    """On all cores, in every configuration. Numbers of requests: those that Triton tells apart."""
    with precompile(), tuned_by(asked):
        for kind in kinds.values():
            requests = [one for one in kind.requests if one < 256]
            for count, width, way in product(requests, kind.widths, kind.ways.values()):
                with suppress(Exception):
                    way(kind.work(count, width, 1))(0)


def every(run: Callable[[int], Result], layers: int, held: list[Any]) -> None:
    """held: what is computed, so that no layer takes the room of another's."""
    held[:] = [run(layer) for layer in range(layers)]


def time_row(kind: Kind, ways: dict[str, Way], requests: int, width: int) -> dict[str, float]:
    """Microseconds a layer."""
    layers = max(2, min(36, 512 // (requests * width)))
    work = kind.work(requests, width, layers)
    # A graph reads what its way made outside of it: both are kept until it has run.
    graphs, held = dict[str, Any](), list[tuple[Callable[[int], Result], list[Any]]]()
    with tuned_quickly():
        for name, way in ways.items():
            try:
                held.append((way(work), []))
                graphs[name] = captured(partial(every, held[-1][0], layers, held[-1][1]))
            except Exception as problem:
                print(f"{name}, {requests} x {width}: {type(problem).__name__}: {problem}")
        return in_turns(graphs, layers)


def time_kind(name: str, kind: Kind, ways: dict[str, Way], speed: float) -> list[dict[str, Any]]:
    found = []
    for requests, width in product(kind.requests, kind.widths):
        us = time_row(kind, ways, requests, width)
        state = 4 * bench.SHAPE.num_heads * bench.SHAPE.key_dim * bench.SHAPE.value_dim
        row = {"what": name, "requests": requests, "tokens": width}
        row |= {f"{column} us": us.get(column) for column in COLUMNS}
        row["its states' bytes us"] = requests * state * kind.moves / speed * 1e6
        found.append(row)
        told = ", ".join(f"{name} {one:.1f}" for name, one in us.items())
        print(f"{name:>7} {requests:4} x {width:5}: us a layer: {told}", flush=True)
        torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    kinds = {name: KINDS[name] for name in args.kinds}
    compile_all(kinds)
    ways = {name: usable(name, kind) for name, kind in kinds.items()}
    speed, rows = copy_speed(), list[dict[str, Any]]()
    for name, kind in kinds.items():
        rows += time_kind(name, kind, ways[name], speed)
        if args.json is not None:
            args.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    if len(kinds) == len(KINDS):
        print(report.write("family-layers", "delta-libraries", TITLE, rows, NOTES))


NOTES = """
A layer with its convolution. decode: a token a request; verify: several, of a chain, after which
states are as before; commit: moving states on by all of these; tree: 8 nodes, a binary tree;
prompt: without earlier text. "its rule alone": without the convolution. "in slots": states
gathered from slots and written back, which our kernels do in place. fla-core keeps no states of
nodes: it commits by running the rule again, and takes a tree as a sequence a leaf, each from a copy
of the state. Its convolution is one kernel before few tokens, whose queries, keys and values the
rule copies apart, and one each before prompts. Its outputs are bfloat16, ours float32. bytes:
states read (decode, commit: and written; prompt: written alone) once at the speed of a copy.
"""


if __name__ == "__main__":
    main()
