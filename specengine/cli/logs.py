"""Where log lines go."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# Loggers of libraries that tell of every step at INFO.
_TALKATIVE = ("uvicorn.error", "httpx", "httpx2", "httpcore", "asyncio")


def set_up_logging(level: str, format: str = "text") -> None:
    """To stderr, so that stdout stays free for results. format: "text", or "json" for an object a
    line."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    if format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger and message; in place of the message, `fields` where a record has
    them; the stack trace of an error."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname, "logger": record.name}
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
