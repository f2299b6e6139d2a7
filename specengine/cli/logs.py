"""Where log lines go."""

from __future__ import annotations

import logging
import sys

# Loggers of libraries that tell of every step at INFO.
_TALKATIVE = ("uvicorn.error", "httpx", "httpx2", "httpcore", "asyncio")
_PROBES = ("/health", "/ready", "/metrics")


def set_up_logging(level: str) -> None:
    """To stderr, so that stdout stays free for results."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Probes come every few seconds and say nothing."""
    return not any(f" {path} " in record.getMessage() for path in _PROBES)
