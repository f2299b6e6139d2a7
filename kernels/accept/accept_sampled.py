"""What the rules for sampled drafts weigh, what they toss coins with, and what they decide."""

from __future__ import annotations
