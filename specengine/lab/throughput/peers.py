"""What peers reach on the same work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specengine.core.errors import ConfigError
from specengine.lab.throughput.report import Peers
from specengine.lab.throughput.workload import Workload

# In a checkout; an installed package has none.
FIGURES = Path(__file__).resolve().parents[3] / "benchmarks" / "peers" / "figures.yaml"
_CLOSE = 0.1  # accepted lengths that count as the same


@dataclass(frozen=True)
class Asked:
    """Whose peers are looked for."""

    model: str
    algorithm: str | None
    tau: float | None  # the length that was forced
    gpu: str | None
    workload: Workload


def find_peers(asked: Asked, file: Path | None) -> Peers | None:
    """Those measured with this model, algorithm and work on this GPU; None where there are none.
    Raises ConfigError for a file that cannot be read."""
    if file is None and not FIGURES.is_file():
        return None
    known = _read(file or FIGURES)
    work = {"prompt_len": asked.workload.prompt_len, "new_tokens": asked.workload.new_tokens}
    if known["workload"] != work or asked.workload.temperature:
        return None
    if asked.gpu is None or str(known["gpu"]) not in asked.gpu:
        return None
    rates = {one["engine"]: one["rates"] for one in known["figures"] if _fits(one, asked)}
    if not rates:
        return None
    return Peers(
        date=str(known["date"]),
        source=known["source"],
        engines={name: known["engines"][name] for name in rates},
        rates=rates,
        startup_seconds=known["startup_seconds"],
    )


def _fits(figure: dict[str, Any], asked: Asked) -> bool:
    if asked.model not in figure["models"] or figure.get("algorithm") != asked.algorithm:
        return False
    forced = figure.get("tau")
    if forced is None or asked.tau is None:
        return forced is asked.tau
    return bool(abs(forced - asked.tau) < _CLOSE)


def _read(file: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        return {name: known[name] for name in _KEYS}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--peers {file}: {error!r}; see benchmarks/peers/figures.yaml"
        ) from error


_KEYS = ("date", "source", "gpu", "workload", "engines", "figures", "startup_seconds")
