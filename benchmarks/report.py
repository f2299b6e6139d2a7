"""The pages of benchmarks/results. TOPIC.json holds the tables of a topic; its Markdown page and
the index (README.md) are drawn from these files and never edited.

    python benchmarks/report.py                    # draw every page and the index again
    python benchmarks/report.py TOPIC TABLE LABEL=FILE.json ... [--kind startup]
    python benchmarks/report.py --take FILE.json ...

The second form replaces a table by reports that `specengine bench accept|serve|step|throughput`
wrote with --json. A script of this folder replaces its own table; where BENCHMARK_TABLES names a
folder, it writes TOPIC.TABLE.json there instead, and the third form takes such files in. Title,
sentence and plot of a topic, and what a reader should know of a table ("notes", a list of
paragraphs), are edited in the JSON file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

import bench_tables

from specengine.lab.environment import environment

RESULTS = Path(__file__).parent / "results"
ELSEWHERE = "BENCHMARK_TABLES"
_JOB = re.compile(r"/\S*/jobs/[\w.-]+")
INDEX = """# Results

A page a topic, newest figures only; older ones and explorations are in git's history. Each table
names its date, commit, hardware, versions and command. Pages and this index are drawn from the JSON
files by `python benchmarks/report.py` and are not edited.

To replace a table, run its command. A script of `benchmarks/` writes the table itself; a report
that `specengine bench` wrote with `--json` becomes one by
`python benchmarks/report.py TOPIC TABLE LABEL=FILE.json ...`. Code refers to a table by its name.
"""


def write(
    topic: str,
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    notes: str = "",
    facts: dict[str, Any] | None = None,
) -> Path:
    """Replace a table of results/TOPIC.json by rows of equal keys, and draw its page and the index;
    returns the page's path. Where BENCHMARK_TABLES names a folder, the table alone is written
    there, and the file's path is returned. notes: paragraphs, an empty line between two. facts: the
    environment of a measurement that was made elsewhere; None: it was made here and now."""
    path = RESULTS / f"{topic}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: write its title and summary first, with no tables")
    columns = list(rows[0]) if rows else []
    made = {
        "title": title,
        "date": datetime.date.today().isoformat(),
        "environment": _without_folders(environment() if facts is None else facts),
        "columns": columns,
        "rows": [[rounded(row.get(column)) for column in columns] for row in rows],
        "notes": [" ".join(one.split()) for one in notes.split("\n\n") if one.strip()],
    }
    if ELSEWHERE in os.environ:
        file = Path(os.environ[ELSEWHERE], f"{topic}.{name}.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(compact({"tables": {name: made}}))
        return file
    return _put(path, {name: made})


def _without_folders(facts: dict[str, Any]) -> dict[str, Any]:
    """A job's folder in a lease is OUT: where it lay says nothing."""
    if "command" not in facts:
        return facts
    return {**facts, "command": _JOB.sub("OUT", facts["command"])}


def take(files: list[Path]) -> list[Path]:
    """Put tables into their topics that `write` left elsewhere. Several of one name become one, row
    after row. Returns the pages' paths. Raises SystemExit where columns differ."""
    found: dict[Path, dict[str, Any]] = {}
    for file in files:
        topic = RESULTS / f"{file.name.partition('.')[0]}.json"
        if not topic.exists():
            raise SystemExit(f"{file}: there is no topic {topic.stem}")
        for name, table in json.loads(file.read_text())["tables"].items():
            before = found.setdefault(topic, {}).get(name)
            found[topic][name] = table if before is None else _joined(before, table, file)
    return [_put(topic, tables) for topic, tables in found.items()]


def _joined(before: dict[str, Any], table: dict[str, Any], file: Path) -> dict[str, Any]:
    if before["columns"] != table["columns"]:
        raise SystemExit(f"{file}: its columns are not those of the table's other files")
    facts = [one["environment"] for one in (before, table)]
    both = {
        key: separator.join(dict.fromkeys(one[key] for one in facts))
        for key, separator in (("command", "\n"), ("commit", ", "))
    }
    rows = before["rows"] + table["rows"]
    return {**before, "environment": {**facts[0], **both}, "rows": rows}


def _put(path: Path, tables: dict[str, Any]) -> Path:
    record = json.loads(path.read_text())
    record["tables"] |= tables
    path.write_text(compact(record))
    draw()
    return path.with_suffix(".md")


def rounded(value: Any) -> Any:
    """A float as it is filed: four significant digits, and no decimals from 1,000 on."""
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def compact(record: dict[str, Any]) -> str:
    """JSON with a line a row of a table."""
    tables = record["tables"].items()
    lines = [f" {json.dumps(key)}: {_json(record[key])}," for key in record if key != "tables"]
    drawn = [
        f"  {json.dumps(name)}: {{\n"
        + "".join(f"   {json.dumps(key)}: {_json(table[key])},\n" for key in table if key != "rows")
        + '   "rows": [\n'
        + ",\n".join(f"    {_json(row)}" for row in table["rows"])
        + "\n   ]}"
        for name, table in tables
    ]
    return "{\n" + "\n".join([*lines, ' "tables": {']) + "\n" + ",\n".join(drawn) + "\n }\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def topics() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def draw() -> None:
    """Every page and the index, from the JSON files."""
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    drawn = {RESULTS / f"{name}.md": page(record) for name, record in topics().items()}
    return {**drawn, RESULTS / "README.md": index()}


def page(record: dict[str, Any]) -> str:
    parts = [f"# {record['title']}", record["summary"]]
    if "plot" in record:
        parts.append(f"![{record['title']}]({record['plot']})")
    for name, one in record["tables"].items():
        parts += [f"## {one['title']}", f"`{name}`, {one['date']}, {machine(one['environment'])}."]
        if "command" in one["environment"]:
            parts.append("    " + one["environment"]["command"].replace("\n", "\n    "))
        rows = [dict(zip(one["columns"], row, strict=True)) for row in one["rows"]]
        parts += ["\n".join(table(rows)), *one["notes"]]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    rows = []
    for name, record in topics().items():
        tables = record["tables"]
        newest = max(tables.values(), key=lambda one: one["date"])
        rows.append(
            {
                "topic": f"[{name}]({name}.md)",
                "what it says": record["summary"],
                "newest": newest["date"],
                "commit": newest["environment"]["commit"],
                "tables": ", ".join(f"`{table}`" for table in tables),
            }
        )
    return "\n".join([INDEX, *table(rows)]) + "\n"


def machine(facts: dict[str, Any]) -> str:
    """Commit, hardware and versions, in one sentence."""
    hardware = facts.get("gpu") or facts["cpu"]
    parts = [f"{facts[part]} {part}" for part in ("cores", "threads") if part in facts]
    hardware += f" ({', '.join(parts)})" if parts else ""
    python = [f"Python {facts['python']}"] if "python" in facts else []
    versions = [f"{name} {number}" for name, number in facts["versions"].items() if number]
    return ", ".join([f"commit {facts['commit']}", hardware, *python, *versions])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return []
    keys = list(rows[0])
    body = ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows]
    return ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys), *body]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", nargs="?")
    parser.add_argument("table", nargs="?")
    parser.add_argument("reports", nargs="*", metavar="LABEL=FILE.json")
    parser.add_argument("--kind", choices=sorted(bench_tables.KINDS), help="default: by the report")
    parser.add_argument("--title", help="default: the title that the table has")
    parser.add_argument("--notes", default="", help="what a reader should know of it")
    parser.add_argument("--take", nargs="+", type=Path, metavar="FILE", help="tables to take in")
    args = parser.parse_args()
    if args.take:
        print(*take(args.take), sep="\n")
        return
    if args.topic is None:
        draw()
        return
    if not args.reports:
        parser.error("name a table and at least one report: LABEL=FILE.json")
    reports = {}
    for one in args.reports:
        label, _, file = one.rpartition("=")
        reports[label or Path(file).stem] = json.loads(Path(file).read_text())
    old = topics()[args.topic]["tables"].get(args.table, {})
    title = args.title or old.get("title", args.table)
    rows, facts = bench_tables.read(reports, args.kind), bench_tables.facts(reports)
    print(write(args.topic, args.table, title, rows, args.notes, facts))


if __name__ == "__main__":
    main()
