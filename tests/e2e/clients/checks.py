"""What every script of a client needs. Scripts run outside of the project: this imports nothing."""

from __future__ import annotations

import os

BASE_URL = os.environ["BASE_URL"]
API = BASE_URL + "/v1"
MODEL = os.environ["MODEL"]
TOKENIZER = os.environ["TOKENIZER"]
QUESTION = "Give me five tips for better sleep."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def passed(what: str) -> None:
    """Tell the runner what was driven."""
    print(f"ok: {what}", flush=True)
