"""Experts of a layer: libraries' kernels beside ours, from the chosen experts on.

    python -m benchmarks.kernels.library_experts [--json FILE] [--shapes qwen3-30b-a3b:fp8]
        [--rows 1 8 64] [--without NAME ...]

Which experts a row chooses is given to all: evenly, and each row others. What follows counts:
sorting, both products, activation, weighted sum, and rounding to FP8. Libraries: vLLM's and
SGLang's Triton kernels with their tuned tiles (library_modules.py), Marlin and triton_kernels in
vLLM, CUTLASS in sglang-kernel, FlashInfer, which compiles for minutes at its first call, and
PyTorch's grouped product. A library that is not there, or that fails, is said and left out. Ours
is what a served layer runs at that number of rows.

Each form is first compared with float64 of what its weights say, some rows at each number of rows:
1% of the largest value. FP8: 3%, beside float64 of rounded rows: an activation that its rounding to
bfloat16 moves across a middle is an eighth off. Whole numbers: 2%, as Marlin multiplies them by
their scales in bfloat16. A time is what experts add to a chain of adding norms in a CUDA graph,
over the weights of COPIES layers in turns: the norm adds up what ours leaves in parts, and rounds
what ours reads, as in a served layer.
"""

from __future__ import annotations

import argparse
import json
import operator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.expert_forms import FORMS, OURS, US, Drawn, Form, Stack, draw
from benchmarks.kernels.experts import SHAPES, Shape, graph_us, summed
from specengine.kernels.experts.types import Chosen
from specengine.kernels.linear import fp8_linear_ref
from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.precompile import precompile
from specengine.lab.environment import environment

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
CASES = {
    f"{name}:{form}": (shape, form)
    for name, shape, forms in (
        ("qwen3-30b-a3b", SHAPES["qwen3-30b-a3b"], ("bf16", "fp8", "int4")),
        ("qwen3-next", Shape(2048, 512, 512, 10), ("fp8",)),
        ("gpt-oss-20b", SHAPES["gpt-oss-20b"], ("mxfp4",)),
    )
    for form in forms
}
LIBRARIES = sorted({name for forms in FORMS.values() for name in forms} - {OURS})
NORM = "norm alone"
COPIES, EPS = 3, 1e-6
CHECKED = 4  # rows of each number of rows


def choose(shape: Shape, rows: int, seed: int, device: str = "cuda") -> Chosen:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, shape.count, device=device, generator=generator)
    found = logits.topk(shape.chosen)
    return Chosen(found.indices.int(), found.values.softmax(-1))


# What is right.


def most_error(form: str) -> float:
    """Beside float64, of the largest value."""
    return {"fp8": 0.03, "int4": 0.02}.get(form, 0.01)


def expected(x: Tensor, chosen: Chosen, drawn: Drawn) -> Tensor:
    """float64 [R, H]."""
    out, how, form = torch.zeros_like(x, dtype=torch.float64), drawn.shape.activation, drawn.rounds
    given = _rounded(x, form)
    for row, place in product(range(len(x)), range(chosen.ids_TK.shape[1])):
        expert = int(chosen.ids_TK[row, place])
        gate, up = _product(drawn.gate_up, expert, given[row]).chunk(2)
        if how.name == "clamped":
            gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit) + 1
        alpha = how.alpha if how.name == "clamped" else 1.0
        activated = gate * torch.sigmoid(alpha * gate) * up
        if form is not None:
            activated = _rounded(activated.to(x.dtype)[None], form)[0]
        weight = chosen.weights_TK[row, place].double()
        out[row] += weight * _product(drawn.down, expert, activated)
    return out


def _product(stack: Stack, expert: int, x: Tensor) -> Tensor:
    made = stack.dense(expert) @ x
    return made if stack.bias is None else made + stack.bias[expert].double()


def _rounded(x: Tensor, form: Fp8Input | None) -> Tensor:
    """float64 of the same shape."""
    if form is None:
        return x.double()
    codes, scale = fp8_linear_ref.quantise_rows(x, form)
    groups = codes.double().view(len(x), scale.shape[1], -1)
    return (groups * scale.double()[:, :, None]).view(x.shape)


# Measuring.


@dataclass(frozen=True)
class Bench:
    name: str
    format: str
    drawn: Drawn
    rows: tuple[int, ...]
    device: str = "cuda"

    @property
    def shape(self) -> Shape:
        return self.drawn.shape

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(rows + seed)
        size = rows, self.shape.hidden
        return torch.randn(size, device=self.device, generator=generator).bfloat16()

    def chosen(self, rows: int, seed: int = 0) -> Chosen:
        return choose(self.shape, rows, 1000 * seed + rows, self.device)

    def truth(self, rows: int) -> tuple[Tensor, Tensor]:
        """Some rows, and what is right of them."""
        some = torch.linspace(0, rows - 1, min(rows, CHECKED), device=self.device).long()
        chosen = self.chosen(rows)
        own = Chosen(chosen.ids_TK[some], chosen.weights_TK[some])
        return some, expected(self.inputs(rows)[some], own, self.drawn)

    def error(self, form: Form, weights: Any, truths: dict[int, tuple[Tensor, Tensor]]) -> float:
        """The largest of all numbers of rows, of the largest value. Raises what the form raises."""
        errors = list[float]()
        for rows, (some, truth) in truths.items():
            chosen = form.routed(self.chosen(rows), self.shape.count)
            out = summed(form.run(self.inputs(rows), chosen, weights))[some].double()
            error = float((out - truth).abs().max() / truth.abs().max())
            errors.append(error if error == error else float("inf"))
        return max(errors)

    def compile(self, made: dict[str, tuple[Form, Any]]) -> None:
        """On all cores, before anything is timed. What cannot be is compiled where it is run."""
        with precompile():
            for (form, weights), rows in product(made.values(), self.rows):
                if form.is_triton:
                    with suppress(Exception):
                        self.link(form, rows, [weights])()

    def link(self, form: Form | None, rows: int, held: list[Any], links: int = 1) -> Any:
        """A call of so many links: experts and the adding norm behind them. Without a form: norms
        alone."""
        into = self.drawn.rounds if form is US else None
        gain = torch.ones(self.shape.hidden, device=self.device, dtype=torch.bfloat16)
        stream, routed = self.inputs(rows, 1), (form or US).routed
        given = [routed(self.chosen(rows, seed), self.shape.count) for seed in range(links)]

        def call() -> Tensor:
            total, x = stream, rms_norm(stream, gain, EPS, into=into)
            for place, chosen in enumerate(given):
                out = x if form is None else form.run(x, chosen, held[place % len(held)])
                add = sum_add_rms_norm if out.dim() == 3 else fused_add_rms_norm
                x, total = add(out, total, gain, EPS, into=into)
            return x

        return call

    def us(self, form: Form | None, rows: int, held: list[Any]) -> float:
        links = 4 * COPIES if rows <= 256 else COPIES
        return graph_us([self.link(form, rows, held, links)]) / links

    def timed(self, name: str, us: dict[int, float]) -> list[dict[str, Any]]:
        return [{"shape": self.name, "form": name, "rows": r, "us": us[r]} for r in us]

    def measure(self, forms: dict[str, Form]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Times of those that run and are right, and what came of each."""
        found, made = dict[str, str](), dict[str, tuple[Form, Any]]()
        for name, form in forms.items():
            try:
                made[name] = form, form.make(self.drawn)
            except Exception as problem:
                found[name] = said(problem)
        self.compile(made)
        norms = {rows: self.us(None, rows, []) for rows in self.rows}
        table = self.timed(NORM, norms)
        truths = {rows: self.truth(rows) for rows in self.rows}
        for name, (form, weights) in made.items():
            us = dict[int, float]()
            try:
                error = self.error(form, weights, truths)
                found[name] = f"error {error:.1e}"
                if error < most_error(self.format):
                    held = [weights, *(copied(weights) for _ in range(COPIES - 1))]
                    for rows in self.rows:
                        us[rows] = self.us(form, rows, held) - norms[rows]
                    del held
            except Exception as problem:
                found[name] = said(problem)
            table += self.timed(name, us)
            made[name] = form, None
            with suppress(Exception):
                torch.cuda.empty_cache()
        return table, found


def copied(made: Any) -> Any:
    """With tensors of its own, all else as it is."""
    if isinstance(made, Tensor):
        return made.clone()
    if isinstance(made, tuple | list):
        parts = [copied(one) for one in made]
        return made if all(map(operator.is_, parts, made)) else type(made)(parts)
    if isinstance(made, dict):
        return {name: copied(one) for name, one in made.items()}
    if not is_dataclass(made) or isinstance(made, type):
        return made
    held = {field.name: getattr(made, field.name) for field in fields(made) if field.init}
    copies = {name: copied(one) for name, one in held.items()}
    return replace(made, **{name: one for name, one in copies.items() if one is not held[name]})


def said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:200]}"


def show(bench: Bench, table: list[dict[str, Any]], found: dict[str, str]) -> None:
    shape = bench.shape
    print(
        f"\n{bench.name}: {shape.count} experts, {shape.chosen} chosen, {shape.hidden} and "
        f"{shape.inner} features; us a layer"
    )
    print(f"{'':>18}", *(f"{rows:>8}" for rows in bench.rows))
    for name in dict.fromkeys([NORM, *found]):
        us = {one["rows"]: one["us"] for one in table if one["form"] == name}
        cells = [f"{us[rows]:8.1f}" if rows in us else f"{'-':>8}" for rows in bench.rows]
        print(f"{name:>18}", *cells, "", found.get(name, ""), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--without", nargs="+", choices=LIBRARIES, default=[])
    args = parser.parse_args()
    torch.manual_seed(0)
    table, checks = list[dict[str, Any]](), dict[str, dict[str, str]]()
    for name in args.shapes:
        shape, form = CASES[name]
        bench = Bench(name, form, draw(shape, form), tuple(args.rows))
        forms = {one: made for one, made in FORMS[form].items() if one not in args.without}
        timed, checks[name] = bench.measure(forms)
        table += timed
        show(bench, timed, checks[name])
        if args.json is not None:
            facts = {"environment": environment(), "checks": checks, "forms": table}
            args.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
