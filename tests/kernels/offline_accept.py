"""The kernels that decide about drafts, compiled for Hopper; for a process of its own.
Prints how many forms of each there are. Argument: "every size", or "one size"."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from specengine.kernels.accept.accept_block import accept_block
from specengine.kernels.accept.accept_path import accept_path
from specengine.kernels.accept.accept_rejection import accept_rejection
from specengine.kernels.accept.accept_relaxed import accept_relaxed
from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.types import Accepted, RoundState
from specengine.kernels.sample.draw_siblings import draw_siblings
from specengine.kernels.sample.edit_rows import edit_rows_
from specengine.kernels.sample.types import ChoiceTable, DraftedNodes, DrawPlaces, EditTables
from specengine.kernels.sample.weigh_rows import weigh_rows
from specengine.kernels.tree.tree_build import tree_build
from specengine.kernels.tree.tree_shape import tree_shape
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Drawn, Found, TreeLimits
from tests.kernels import offline_triton, relaxed_world
from tests.kernels.sampled_world import CPU, draws_of, random_round


def main(sizes: str) -> None:
    first = 0 if sizes == "every size" else -1
    vocab = 9000 if sizes == "every size" else 1000  # of kernels whose blocks take a row by turns
    offline_triton.use()
    launch, compiled = JITFunction.run, Counter[str]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        compiled[kernel.__name__] += "cubin" in made.asm
        return made

    JITFunction.run = compile_only
    drafts = random_round(random.Random(0), 3, 5, 9000, tree=False)
    for rule in (accept_rejection, accept_block, accept_sibling, accept_target_only):
        rule(drafts, draws_of(3, CPU), backend="triton")
    numbered = replace(drafts, numbers_BN=drafts.nodes().contiguous())
    for rule in (accept_sibling, accept_target_only):
        rule(numbered, draws_of(3, CPU), backend="triton")
    relaxed = relaxed_world.random_round(random.Random(0), 3, 5, 9000, tree=False)
    for logits_TV in (relaxed.logits_TV, relaxed.logits_TV.bfloat16()):
        accept_relaxed(replace(relaxed, logits_TV=logits_TV), 3, 0.3, backend="triton")
    for num_nodes, num_steps in ((2, 1), (7, 3), (40, 39))[first:]:
        nodes = torch.zeros(4, 2, 40, dtype=torch.int64)
        tree_shape(nodes[:, 0, 0].contiguous(), nodes, num_nodes, num_steps, backend="triton")
    table, place = ChoiceTable.of(3, CPU), torch.arange(3)
    weigh_rows(torch.zeros(6, vocab), table, DrawPlaces(place, place, 2), 0, backend="triton")
    edits, starts = EditTables.of(3, 2, 9000, CPU), torch.zeros(3, dtype=torch.int64)
    nodes, mask = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2, 2, dtype=torch.bool)
    depths = torch.zeros(6, dtype=torch.int64)
    for above in ((), (depths, mask), (depths, mask, False)):
        drafted = DraftedNodes(starts, starts, nodes, *above)
        edit_rows_(torch.zeros(6, 9000), edits, drafted, backend="triton")
    for topk, num_steps, num_nodes in ((2, 3, 2), (4, 5, 40))[first:]:
        found, roots = Found.of(3, topk, num_steps, CPU), torch.zeros(3, dtype=torch.int64)
        for limits in (None, TreeLimits(topk, roots, roots)):
            tree = tree_build(roots, found, num_nodes, num_steps, limits, backend="triton")
        state, ended = RoundState.of(3, 3, num_steps, CPU), Accepted(roots, roots)
        accept_path(state, roots, ended, tree, num_steps, 99, backend="triton")
        drawn = Drawn(torch.zeros(3, topk, dtype=torch.int64), torch.zeros(topk), roots == 0)
        for given in (None, drawn):
            counters = torch.zeros(3, dtype=torch.int32)
            tree_step(
                torch.zeros(3, 9000), None, found, topk, counters, drawn=given, backend="triton"
            )
        draw_siblings(torch.zeros(3, vocab), torch.zeros(3, topk).double(), backend="triton")
    print(json.dumps(compiled))


if __name__ == "__main__":
    main(sys.argv[1])
