"""File what a server of several processes lost by an attack and by a soak.

python -m tests.e2e.hostile.attack --requests 10000 --json attack.json
python -m tests.e2e.hostile.soak --requests 10000 --json soak.json
python benchmarks/serving/robustness.py --attack attack.json --soak soak.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

TOPIC = "serving-robustness"
ATTACK = """\
Bodies of the protocol's table, mutated (two fifths); requests that schemathesis draws from
/openapi.json (three tenths); bad framing, half requests, slow bodies, answers left unread, resets
(a quarter); the known examples of bodies and grammars. 24 clients, which leave after 5 s. Two front
ends and an engine with EAGLE-3 drafts of a fixed depth, 16,384 KV slots, on the two cores that the
clients use as well. A probe asks for one token every 50 ms from a process of its own.

503 comes by a limit alone, 501 for what the model cannot do. "no answer": the client left, or the
use of the connection deserves none. Memory: resident MiB of supervisor, engine and front ends,
after a warm-up of 300 hostile requests and after 30 s of rest at most. "Without the time in which
no core was free": what the processes on a probe's way waited for a core is taken off.
"""
SOAK = """\
Every body of the protocol's table and longer ones (grammars, tools, streams, logprobs, several
choices, shared prefixes), by 24 clients, a fifth cancelled within 0.3 s; EAGLE-3 drafts of a fixed
depth, 6,144 KV slots. Answers are compared with those of a server without drafts.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", type=Path)
    parser.add_argument("--soak", type=Path)
    parser.add_argument("--commit", help="that was measured, where it is not the present one")
    parser.add_argument("--notes", default="", help="more about this measurement")
    args = parser.parse_args()
    facts = report.environment() | ({"commit": args.commit} if args.commit else {})
    named = (("attack", "Hostile requests", ATTACK), ("soak", "Mixed requests", SOAK))
    for name, title, notes in named:
        if (path := getattr(args, name)) is not None:
            figures = json.loads(path.read_text())
            facts["command"] = (
                f"python -m tests.e2e.hostile.{name} --requests {figures['requests']}"
            )
            rows = list(rows_of(figures))
            print(report.write(TOPIC, name, title, rows, f"{notes}\n\n{args.notes}", facts))


def rows_of(figures: dict[str, Any]) -> Any:
    for name, value in figures.items():
        if name == "by kind":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {one}" for key, one in value.items())
        elif isinstance(value, list):
            value = " / ".join(map(str, value))
        yield {"what": name, "figure": value}


if __name__ == "__main__":
    main()
