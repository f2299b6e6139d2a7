"""What each conversation is to be, which follows from the seed and its number alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

from specengine.core.errors import DataError
from specengine.draft.train.data.prompts import Prompt, read_prompts
from specengine.lab.generate.config import GenerationConfig

BUILT_IN_OPENINGS = "openings.jsonl"


@dataclass(frozen=True)
class Opening:
    """Words that a self-written user turn begins with."""

    category: str
    opening: str


@dataclass(frozen=True)
class Plan:
    """One conversation. turns: what the user says, or () where the target writes that as well."""

    number: int
    category: str
    turns: tuple[str, ...]
    system: str | None
    opening: str
    num_turns: int
    temperature: float  # of the answers
    user_temperature: float = 1.0  # of user turns that the target writes

    @property
    def is_self_written(self) -> bool:
        return not self.turns


def derive_seed(seed: int, number: int, purpose: str) -> int:
    """62 bits for one use of a conversation."""
    text = f"{seed} {number} {purpose}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 2


class Plans:
    """Conversations by number, 0 upwards; None past the end."""

    def __init__(
        self, config: GenerationConfig, prompts: Sequence[Prompt], openings: Sequence[Opening]
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._order = list(range(len(prompts)))
        random.Random(config.seed).shuffle(self._order)
        self._openings: dict[str, list[str]] = {}
        for one in openings:
            self._openings.setdefault(one.category, []).append(one.opening)

    def __getitem__(self, number: int) -> Plan | None:
        config = self._config
        limit = config.max_conversations
        if limit is not None and number >= limit:
            return None
        rng = random.Random(derive_seed(config.seed, number, "plan"))
        given = self._prompt_number(number)
        if given is not None and given < len(self._prompts) * config.prompt_repeats:
            return self._answered(number, self._prompts[self._order[given % len(self._order)]], rng)
        return self._self_written(number, rng) if config.written_share else None

    def _prompt_number(self, number: int) -> int | None:
        """Conversations that take a prompt of the files are spread evenly among the others."""
        share = 1.0 - self._config.written_share
        count = int(number * share)
        return count if int((number + 1) * share) > count else None

    def _answered(self, number: int, prompt: Prompt, rng: random.Random) -> Plan:
        return Plan(
            number=number,
            category=prompt.category or "prompts",
            turns=prompt.turns,
            system=prompt.system,
            opening="",
            num_turns=len(prompt.turns),
            temperature=rng.choice(self._config.temperatures),
        )

    def _self_written(self, number: int, rng: random.Random) -> Plan:
        config = self._config
        temperature = rng.choice(config.temperatures)
        user_temperature = rng.choice(config.user_temperatures)
        goes_on = rng.random() < config.second_turn_share
        category, opening = "free", ""
        if self._openings and rng.random() < config.openings_share:
            category = rng.choice(sorted(self._openings))
            opening = rng.choice(self._openings[category])
        return Plan(
            number=number,
            category=f"self-written {category}",
            turns=(),
            system=None,
            opening=opening,
            num_turns=2 if goes_on else 1,
            temperature=temperature,
            user_temperature=user_temperature,
        )


def make_plans(config: GenerationConfig) -> Plans:
    """Raises DataError for a file that cannot be read."""
    prompts = [prompt for path in config.prompts for prompt in read_prompts(path)]
    return Plans(config, prompts, read_openings(config.openings))


def read_openings(path: str | None) -> list[Opening]:
    """JSONL of `category` and `opening`; None reads the ones that come along."""
    name = path or BUILT_IN_OPENINGS
    try:
        source = files(__package__).joinpath(name) if path is None else Path(path)
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the openings {name}: {error}") from error
    openings = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            # A space at the end would be a token of its own, and no word goes on from there.
            opening = Opening(str(row["category"]), str(row["opening"]).rstrip(" "))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{name}:{number} is no JSON object with `category` and `opening`: {error}"
            ) from error
        openings.append(opening)
    return openings
