"""What is asked of an engine: the same of ours and of its peers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from specengine.core.sampling import SamplingParams

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Workload:
    """Every batch starts and ends together: prompts of one length, and as many new tokens each,
    whatever they are. A run warms up; the best of `repeats` others counts."""

    batch_sizes: tuple[int, ...] = (1, 8, 64)
    prompt_len: int = 30
    new_tokens: int = 256
    repeats: int = 3
    prompt_period: int | None = None  # prompts repeat themselves after so many tokens
    temperature: float = 0.0  # 0 is greedy

    @property
    def longest(self) -> int:
        """Tokens of a request."""
        return self.prompt_len + self.new_tokens

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True
        )

    def batches(self, batch_size: int, vocab_size: int) -> list[list[list[int]]]:
        """Token ids of a batch for each run, the one that warms up included. They differ, so that
        no prefix cache helps."""
        rng, most = random.Random(batch_size), min(2000, vocab_size)
        period = min(self.prompt_period or self.prompt_len, self.prompt_len)

        def prompt() -> list[int]:
            piece = [rng.randrange(most) for _ in range(period)]
            return (piece * -(-self.prompt_len // period))[: self.prompt_len]

        return [[prompt() for _ in range(batch_size)] for _ in range(self.repeats + 1)]
