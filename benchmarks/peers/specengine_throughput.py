"""`specengine bench throughput` beside other engines that start on the same card: it loads weights
at once, and takes memory and is measured when it is its turn.

    python benchmarks/peers/specengine_throughput.py smollm2-shape --load-format dummy \\
        --json specengine.json --turns FOLDER

Takes what `bench throughput` takes. Its report names that command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from turns import turn

from specengine.cli.bench import throughput


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=Path, metavar="FOLDER", help="of the others; default: none")
    throughput.add_arguments(parser)
    args = parser.parse_args()
    words = sys.argv[1:]
    if args.turns is not None:
        place = words.index("--turns")
        del words[place : place + 2]
    sys.argv[1:] = ["bench", "throughput", *words]  # what the report shows
    return throughput.run(args, turn(args.turns))


if __name__ == "__main__":
    sys.exit(main())
