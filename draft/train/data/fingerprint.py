"""What tells one tokenizer from another."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of the vocabulary and the rules. Padding and truncation, which any user of the
    tokenizer may set, do not count."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {k: v for k, v in description.items() if k not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
