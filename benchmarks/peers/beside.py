"""A table of this engine beside its peers: output tok/s by batch size, and of the better peer.

    python benchmarks/peers/beside.py two-cards two-cards-peers --title T \
        "8B: specengine=speed.json" "8B: vLLM=vllm.json,vllm-eagle3.json" "8B: SGLang=sglang.json"

Files are reports of `bench throughput` and of the peers' scripts, or what two_cards.py wrote, of
which two cards count. Rows of works that are not named stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

import report
import two_cards_tables

OWN = "specengine"
RATIO = f"{OWN}, of the better peer"
DRAFTS = {"no speculation": "plain", "EAGLE3": "EAGLE-3", "MTP": "MTP"}
Rates = dict[int, float]  # tok/s by batch size
Key = tuple[str, str, str]  # work, drafts, engine


def rates_of(path: Path) -> dict[str, Rates]:
    """By drafts."""
    found = json.loads(path.read_text())
    by_drafts: dict[str, Rates] = {}
    if "settings" not in found:
        for row in two_cards_tables.speed(found["speed"]):
            by_drafts.setdefault(row["drafts"], {})[row["batch"]] = row["two cards"]
        return by_drafts
    for setting in found["settings"]:
        drafts = DRAFTS[setting["name"].removesuffix(" (lossy)")]
        by_drafts[drafts] = {one["batch_size"]: one["rate"] for one in setting["points"]}
    return by_drafts


def rows_of(found: dict[Key, Rates]) -> Iterator[dict[str, Any]]:
    """Each engine's, this one's last, and behind it the ratio to the best of the others."""
    sizes = sorted({size for rates in found.values() for size in rates})
    for work, drafts in dict.fromkeys((work, drafts) for work, drafts, _ in found):
        engines = {name: one for (*key, name), one in found.items() if key == [work, drafts]}
        own = engines.pop(OWN, {})
        shown: list[tuple[str, dict[int, float | None]]] = [
            (name, {size: rates.get(size) for size in sizes}) for name, rates in engines.items()
        ]
        if own:
            shown.append((OWN, {size: own.get(size) for size in sizes}))
        if own and engines:
            shown.append((RATIO, {size: _ratio(own, engines.values(), size) for size in sizes}))
        for name, values in shown:
            cells = {f"batch {size}": values[size] for size in sizes}
            yield {"work": work, "drafts": drafts, "engine": name, **cells}


def _ratio(own: Rates, peers: Any, size: int) -> float | None:
    best = max((rates[size] for rates in peers if size in rates), default=None)
    return None if best is None or size not in own else round(own[size] / best, 2)


def kept(topic: str, name: str, works: set[str]) -> dict[Key, Rates]:
    """What the table has of other works."""
    path = report.RESULTS / f"{topic}.json"
    tables = json.loads(path.read_text())["tables"] if path.exists() else {}
    old = tables.get(name, {"columns": [], "rows": []})
    rows = [dict(zip(old["columns"], row, strict=True)) for row in old["rows"]]
    return {
        (row["work"], row["drafts"], row["engine"]): {
            int(column.split()[1]): value
            for column, value in row.items()
            if column.startswith("batch ") and value is not None
        }
        for row in rows
        if row["work"] not in works and row["engine"] != RATIO
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("topic")
    parser.add_argument("table")
    parser.add_argument("given", nargs="+", metavar="WORK: ENGINE=FILE.json,FILE.json")
    parser.add_argument("--title", required=True)
    parser.add_argument("--notes", default="")
    parser.add_argument("--facts", type=Path, help="the environment; default: of the last report")
    args = parser.parse_args(argv)
    new: dict[Key, Rates] = {}
    facts = None
    for one in args.given:
        title, files = one.split("=", 1)
        work, engine = title.rsplit(": ", 1)
        for file in map(Path, files.split(",")):
            facts = json.loads(file.read_text()).get("environment") or facts
            new |= {(work, drafts, engine): rates for drafts, rates in rates_of(file).items()}
    facts = json.loads(args.facts.read_text()) if args.facts else facts
    found = kept(args.topic, args.table, {work for work, *_ in new}) | new
    page = report.write(args.topic, args.table, args.title, list(rows_of(found)), args.notes, facts)
    print(page)


if __name__ == "__main__":
    main()
