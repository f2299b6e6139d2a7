"""MTP through the real engine: greedy output is plain decoding's, and drafts are the equations'."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.spec import DraftProposal
from tests.draft.mtp_reading import FORMS, Reading, add_mtp
from tests.e2e.test_identity import EIGHT, PROMPTS, greedy, make
from tests.halves import each_value, slow_but
from tests.support.mtp_targets import TARGETS, predictable

NEW_TOKENS = 18
CHAIN = SpecConfig(algorithm="MTP", adaptive=False, num_steps=3)
TREE = SpecConfig(algorithm="MTP", adaptive=False, num_steps=3, eagle_topk=3, num_draft_tokens=8)
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"spec": CHAIN},
    "chain, pages of 16": {"spec": CHAIN, "page_size": 16},
    "chain, chunks of 16": {"spec": CHAIN, "chunked_prefill_size": 16},
    "chain, mixed": {"spec": CHAIN, "chunked_prefill_size": 16, "enable_mixed_chunk": True},
}
# Forms differ in the model alone: each drafts once in `make test`, MiMo's in every setting.
CASES = [(form, 3, "chain") for form in FORMS[:2]] + [("ernie", 1, "chain")]
EVERY = [*CASES, *((form, 1, "chain") for form in FORMS[:2])]
EVERY += [*(("mimo", layers, setting) for setting in SETTINGS for layers in (1, 3))]
CASES += [("mimo", 3, "chain"), ("mimo", 1, "chain, pages of 16")]
CASES += [("mimo", 1, "chain, chunks of 16"), ("mimo", 3, "chain, mixed")]
TREES: dict[str, dict[str, Any]] = {
    "tree": {"spec": TREE},
    "tree, pages of 16": {"spec": TREE, "page_size": 16},
}
EVERY += [("mimo", 1, setting) for setting in TREES]
CASES += [("mimo", 1, "tree, pages of 16")]

Checkpoint = Callable[[str, int], Path]
Plain = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def checkpoint(
    small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """A target in which attention and feed-forward weigh little, with MTP layers that look at the
    embedding most: drafts stand often, but not always."""
    done: dict[tuple[str, int], Path] = {}

    def make_checkpoint(form: str, layers: int) -> Path:
        if (form, layers) not in done:
            folder = tmp_path_factory.mktemp(f"{form}{layers}")
            add_mtp(small_models[TARGETS[form]], folder, form, layers)
            done[form, layers] = predictable(folder, form, layers, residue=0.2)
        return done[form, layers]

    return make_checkpoint


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Greedy answers of a target without drafts."""

    @cache
    def generate(
        folder: Path, prompts: tuple[str, ...] = (*PROMPTS,), new_tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        return greedy(make(folder), [*prompts], new_tokens)

    return generate


def _spec_of(llm: LLM, prompts: list[str]) -> list[Any]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return [one.spec for one in llm.generate(prompts, params)]


@pytest.mark.parametrize(("form", "layers", "setting"), slow_but(CASES, EVERY))
def test_output_is_that_of_plain_decoding(
    form: str, layers: int, setting: str, checkpoint: Checkpoint, plain: Plain
) -> None:
    folder = checkpoint(form, layers)
    llm = make(folder, **(SETTINGS | TREES)[setting])
    assert greedy(llm, PROMPTS, NEW_TOKENS) == plain(folder)
    assert greedy(llm, PROMPTS[:2], 12) == [one[:12] for one in plain(folder)[:2]], "on prefix hits"
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20
    llm.engine.scheduler.check_invariant()


CORNERS: dict[str, dict[str, Any]] = {
    "token by token": {"spec": CHAIN, "chunked_prefill_size": 1},
    "one step": {"spec": SpecConfig(algorithm="nextn", adaptive=False, num_steps=1)},
    "beside suffixes": {
        "spec": SpecConfig(algorithm="MTP", adaptive=False, num_steps=2, hybrid_suffix=True)
    },
}


@pytest.mark.parametrize(
    ("corner", "layers"),
    slow_but(
        [("token by token", 3), ("one step", 1), ("beside suffixes", 3)], product(CORNERS, [1, 3])
    ),
)
def test_corners_change_nothing(
    corner: str, layers: int, checkpoint: Checkpoint, plain: Plain
) -> None:
    folder = checkpoint("mimo", layers)
    prompts = [*PROMPTS[:3], PROMPTS[3][:50]]
    assert greedy(make(folder, **CORNERS[corner]), prompts, 16) == plain(folder, (*prompts,), 16)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_seed_fixes_the_sampled_output(layers: int, checkpoint: Checkpoint) -> None:
    """With drafts or without, whatever else is in the batch."""
    folder = checkpoint("mimo", layers)
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7, ignore_eos=True)
    other = SamplingParams(max_tokens=16, temperature=1.3, seed=8, ignore_eos=True)
    expected = make(folder).generate([PROMPTS[0]], params)[0].token_ids
    mixed = make(folder, spec=CHAIN).generate(PROMPTS[:3], [params, other, other])
    assert mixed[0].token_ids == expected


@pytest.mark.parametrize(
    ("layers", "spec", "page_size"),
    slow_but(
        [(1, CHAIN, 1), (3, CHAIN, 16), (1, TREE, 16)],
        [(*one, page_size) for one in [(1, CHAIN), (3, CHAIN), (1, TREE)] for page_size in (1, 16)],
    ),
)
def test_retraction_changes_nothing(
    layers: int, spec: SpecConfig, page_size: int, checkpoint: Checkpoint, plain: Plain
) -> None:
    """Eight requests are admitted on the hope that they end at once; they do not."""
    folder = checkpoint("mimo", layers)
    expected = plain(folder, (*EIGHT,), 28)
    tight = make(folder, spec=spec, page_size=page_size, max_total_tokens=144)
    tight.engine.scheduler.admission.demand.share = 0.0
    assert greedy(tight, EIGHT, new_tokens=28) == expected
    assert tight.engine.scheduler.num_retractions > 0
    tight.engine.scheduler.check_invariant()


@pytest.mark.parametrize(("form", "layers"), each_value(1, FORMS, [1, 3]))
def test_drafts_of_a_predictable_target_all_stand(
    form: str, layers: int, small_models: dict[str, Path], tmp_path: Path
) -> None:
    add_mtp(small_models[TARGETS[form]], tmp_path, form, layers)
    folder = predictable(tmp_path, form, layers, residue=0.0)
    llm = make(folder, spec=CHAIN, chunked_prefill_size=16)
    for spec in _spec_of(llm, PROMPTS[:2] + PROMPTS[3:]):
        assert spec.num_rounds == -(-(NEW_TOKENS - 1) // 4)
        assert spec.num_accepted == NEW_TOKENS - 1 - spec.num_rounds


@pytest.mark.parametrize(
    ("form", "layers"),
    slow_but([*product(FORMS, [3]), ("mimo", 1)], product(FORMS, [1, 3])),
)
def test_drafts_are_those_of_the_equations(
    form: str, layers: int, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that the engine drafts, after prompts in chunks and in every round."""
    folder = checkpoint(form, layers)
    reading = Reading.of(folder)
    flags = {"chunked_prefill_size": 16, "disable_radix_cache": True, "disable_cuda_graph": True}
    llm = make(folder, spec=CHAIN, **flags)  # a replayed graph calls nothing that could be watched
    drafter, compared = llm.engine.drafter, 0
    draft = drafter.draft

    def checked(batch: ScheduleBatch) -> DraftProposal:
        nonlocal compared
        proposal = draft(batch)
        for i, req in enumerate(batch.reqs):
            drafted = proposal.tokens[i, 1 : proposal.num_nodes[i]].tolist()
            assert drafted == _drafts(reading, form, layers, req.token_ids, len(drafted))
            compared += len(drafted)
        return proposal

    monkeypatch.setattr(drafter, "draft", checked)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    llm.generate(PROMPTS[:4], params)
    assert compared > 60


def _drafts(reading: Reading, form: str, layers: int, text: list[int], count: int) -> list[int]:
    """The best continuation of a text, of which the target has seen all but the last token."""
    tokens, states = text[1:], reading.hidden(text[:-1])
    drafted: list[int] = []
    for step in range(count):
        out = reading.mtp(form, tokens, states, index=0 if layers == 1 else step)
        drafted.append(int(reading.mtp_head(form, out[-1]).argmax()))
        if layers == 1:
            tokens, states = [*tokens, drafted[-1]], torch.cat([states, out[-1:]])
        else:
            tokens, states = [*tokens[1:], drafted[-1]], out
    return drafted
