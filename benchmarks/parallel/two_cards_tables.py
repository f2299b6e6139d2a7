"""The tables of results/two-cards.md, from what two_cards.py wrote with --out.

    python benchmarks/parallel/two_cards_tables.py JOBS/*/{identity8,identity30,speed,…}.json \
        --facts JOBS/FACTS.json

A table is replaced if the files hold its part; rows of other models and drafts stay. --facts:
the environment that a job of the same lease noted (specengine.lab.environment), and how many cards.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import report

MODELS = {
    "llama-3.1-8b-shape": "8B shape",
    "qwen3-30b-a3b-shape": "Qwen3-30B-A3B shape",
    "30b-a3b-8-layers": "Qwen3-30B-A3B shape, 8 of 48 layers",
    "llama-3.1-70b-shape": "70B shape",
    "smollm2-shape": "135M shape",
    "tiny": "tiny",
}
DRAFTS = {
    "plain": "plain",
    "eagle3 chain": "EAGLE-3 chain",
    "eagle3 tree": "EAGLE-3 tree",
    "mtp": "MTP",
    "eagle3 forced 2.5": "EAGLE-3",
    "eagle3 forced 2.5, draft whole": "EAGLE-3, draft whole on each card",
}
TITLES = {
    "identity": "One card against two, float32",
    "speed": "bfloat16, 30 tokens in, 128 out: tok/s",
    "rounds": "A round, and the all-reduces in it",
    "memory": "Memory of a rank, bfloat16",
}
Row = dict[str, Any]


def main() -> None:
    args = parse_args()
    found: dict[str, dict[str, Any]] = {}
    for file in args.files:
        for part, values in json.loads(file.read_text()).items():
            found.setdefault(part, {}).update(values)
    facts = json.loads(args.facts.read_text()) if args.facts else None
    rows_of = {"identity": identity, "speed": speed, "rounds": rounds, "memory": memory}
    for part, make in rows_of.items():
        rows = list(make(found.get(part, {})))
        if rows:
            rows = kept(part, {key(row) for row in rows}) + rows
            name = f"two-cards-{part}"
            print(report.write("two-cards", name, TITLES[part], rows, notes_of(name), facts))


def table(name: str) -> dict[str, Any]:
    tables = json.loads((report.RESULTS / "two-cards.json").read_text())["tables"]
    return tables.get(name, {"columns": [], "rows": [], "notes": []})  # type: ignore[no-any-return]


def key(row: Row) -> tuple[str, ...]:
    """What a new row replaces."""
    return row["model"], row["drafts"], row.get("graphs", "")


def kept(part: str, replaced: set[tuple[str, ...]]) -> list[Row]:
    """Rows of other models and drafts, and of rounds with and without graphs."""
    old = table(f"two-cards-{part}")
    rows = [dict(zip(old["columns"], row, strict=True)) for row in old["rows"]]
    return [row for row in rows if key(row) not in replaced]


def notes_of(name: str) -> str:
    return "\n\n".join(table(name)["notes"])


def split(title: str) -> tuple[str, str, str]:
    """Model, drafts, and the rest."""
    model, rest = title.split(" ", 1)
    drafts = max((one for one in DRAFTS if rest.startswith(one)), key=len)
    return MODELS[model], DRAFTS[drafts], rest.removeprefix(drafts).strip()


def identity(found: dict[str, str]) -> Iterator[Row]:
    for title, said in found.items():
        model, drafts, graphs = split(title)
        tokens, accepted, *_ = said.split("; ")
        yield {
            "model": model,
            "drafts": drafts,
            "graphs": "on" if graphs.endswith("True") else "off",
            "tokens": tokens,
            "drafts accepted": int(accepted.split()[0]),
        }


def speed(found: dict[str, Any]) -> Iterator[Row]:
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    for title, value in found.items():
        if " tok/s at " in title:
            model, drafts, rest = split(title)
            rates.setdefault((model, drafts), {})[rest.split(" tok/s")[0]] = value
    for (model, drafts), by_ranks in rates.items():
        one = by_ranks.get("tp 1") or rates.get((model, "EAGLE-3"), {}).get("tp 1")
        for place, (batch, both) in enumerate(zip((1, 8, 64), by_ranks["tp 2"], strict=False)):
            alone = None if one is None else one[place]
            ratio = None if alone is None else round(both / alone, 2)
            row = {"model": model, "drafts": drafts, "batch": batch}
            yield row | {"one card": alone, "two cards": both, "ratio": ratio}


def rounds(found: dict[str, Any]) -> Iterator[Row]:
    rows: dict[tuple[str, str, int], Row] = {}
    for title, said in found.items():
        if not isinstance(said, str) or " batch " not in title:
            continue
        model, drafts, rest = split(title)
        ranks, batch = re.findall(r"tp (\d) batch (\d+)", rest)[0]
        row = rows.setdefault(
            (model, drafts, int(batch)), {"model": model, "drafts": drafts, "batch": int(batch)}
        )
        row["one card, ms" if ranks == "1" else "two cards, ms"] = _number(r"round ([\d.]+)", said)
        if ranks == "2":
            row["all-reduce, us"] = _number(r"all-reduce ([\d.]+)", said)
            row["share of all"] = re.findall(r"(\d+%)", said)[0]
    columns = ("model", "drafts", "batch", "one card, ms", "two cards, ms")
    for row in rows.values():
        yield {one: row.get(one) for one in (*columns, "all-reduce, us", "share of all")}


def memory(found: dict[str, str]) -> Iterator[Row]:
    for title, said in found.items():
        model, drafts, rest = split(title)
        ranks, rank = re.findall(r"tp (\d) rank(\d)", rest)[0]
        sizes = ast.literal_eval(said[: said.index("}") + 1])
        gib = {one: float(size.split()[0]) for one, size in sizes.items()}
        yield {
            "model": model,
            "drafts": drafts,
            "ranks": int(ranks),
            "rank": int(rank),
            "weights, GiB": gib["weights"],
            "weights / formula": _number(r"formula ([\d.]+)", said),
            "KV, GiB": gib["kv"],
            "graphs, GiB": gib["graphs"],
        }


def _number(pattern: str, text: str) -> float:
    return float(re.findall(pattern, text)[0])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--facts", type=Path, help="a job's environment, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
