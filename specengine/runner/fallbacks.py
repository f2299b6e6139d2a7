"""Why a batch ran without a captured graph, and how often: the reasons of /metrics and the log."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

_FALLBACK = "fallback: "  # prefix of a reason's name among the counters

# Reasons. Their texts are labels of /metrics: do not change them. Beside these, a decode graph
# counts "mode NAME" for a forward mode that has no graphs.
BATCH_TOO_LARGE = "batch larger than any captured"
DRAFTER_NEEDS_HOST = "the drafter needs the host in the middle of a draft"
DRAFTER_NOT_READY = "a request that the drafter has seen too little of"
EDITS_FOLLOW_DRAFTS = "edits that follow drafts, with a verifier that weighs those"
EVERY_LOGIT = "logits of every token"
HOOKED = "a hook looks at layers"
KEEPS_STATE = "recurrent state follows the lengths of prompts"
MEMORY_SPENT = "memory for graphs is spent"
MUCH_PADDING = "padding would take longer than launches do"
NEARLY_FULL = "memory nearly full"
NO_EDIT_TABLE = "more requests edit their logits than there are tables for"
NOT_CAPTURED = "no graph of this size yet"
OBSERVED = "a recorder is attached to rounds"
OWN_NUMBERS = "the verifier has random numbers of its own"
OTHERS_WAIT = "experts are shared, and drafts are made on the host"
PADDING_OFF = "padding off"
PLANS_ON_HOST = "the attention backend plans on the host"
PROMPT_TOO_LONG = "a longer prompt than any captured"
RAGGED = "ragged, padding off"
ROUND_NEEDS_HOST = "the drafter needs the host in the middle of a round"
SHARES_EXPERTS = "experts are shared: whole rounds alone are graphs"
SIZE_NOT_CAPTURED = "batch size not captured, padding off"
SPLIT_BY_LAYERS = "a forward of some layers alone"
TOO_MANY_REQUESTS = "more requests than captured"
TOO_MANY_TOKENS = "more tokens than any captured"
TRACED = "rounds are traced"
UNWEIGHED_DRAFTS = "drafts are sampled, and the verifier does not weigh them"
VERIFIER_COMPARES_MORE = "the verifier does more than compare tokens"


@dataclass(frozen=True)
class GraphStats:
    """Counts for one kind of graphs since start."""

    captures: int = 0
    replays: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # batches without a graph, by reason

    @classmethod
    def of(cls, counters: Counter[str]) -> GraphStats:
        """May be called from any thread."""
        now = dict(counters)  # one atomic copy: the engine's thread may add a reason meanwhile
        return cls(
            captures=now.get("captures", 0),
            replays=now.get("replays", 0),
            fallbacks={
                name.removeprefix(_FALLBACK): count
                for name, count in now.items()
                if name.startswith(_FALLBACK)
            },
        )


@dataclass(frozen=True)
class NoGraphs:
    """Takes the place of graphs of a kind that an engine cannot have. Every batch that they would
    have served is a fallback for one reason, which is logged at construction."""

    kind: str
    reason: str
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        logger.info("no %s graphs: %s", self.kind, self.reason)

    def count(self) -> None:
        """Count one batch that such graphs would have served."""
        count_fallback(self.counters, self.kind, self.reason)


def count_fallback(counters: Counter[str], kind: str, reason: str) -> None:
    """Count a batch that no graph of this kind served. Each reason is logged once."""
    counters[_FALLBACK + reason] += 1
    if counters[_FALLBACK + reason] == 1:
        logger.info(
            "a batch without a %s graph: %s (logged once; /metrics counts them)", kind, reason
        )
