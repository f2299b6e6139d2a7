"""What an operator reads of a real engine: queue times, aborts, drafts by position."""

from __future__ import annotations

from pathlib import Path

from specengine import LLM, SamplingParams, SpecConfig

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


def make(small_models: dict[str, Path], **spec: int) -> LLM:
    settings = SpecConfig(algorithm="NGRAM", adaptive=False, ngram_min_match=1, **spec)
    flags = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 1}
    return LLM(str(small_models["llama"]), settings, **flags)


def test_engine_counts_aborts_and_positions(small_models: dict[str, Path]) -> None:
    llm = make(small_models)
    engine = llm.engine
    for rid in ("kept", "left"):
        engine.add_request(rid, [5, 6, 7] * 5, GREEDY)
    engine.step()
    engine.abort("left")
    engine.abort("unknown")
    times = {}
    while engine.has_work:
        times.update({one.rid: one.times for one in engine.step()})
    stats = engine.stats()
    assert stats.num_aborts == 1
    assert list(times) == ["kept"]
    kept = times["kept"]
    assert kept.admitted is not None
    assert kept.first_token is not None
    assert kept.arrival <= kept.admitted <= kept.first_token
    assert (stats.algorithm, stats.drafts_trees) == ("NGRAM", False)
    assert sum(stats.spec.drafted_per_pos) == stats.spec.num_draft_tokens > 0
    assert stats.spec.drafted_per_pos[0] == stats.spec.num_drafts
    pairs = zip(stats.spec.accepted_per_pos, stats.spec.drafted_per_pos, strict=False)
    assert all(accepted <= drafted for accepted, drafted in pairs)


def test_engine_tells_that_it_drafts_trees(small_models: dict[str, Path]) -> None:
    assert make(small_models, ngram_branches=2).engine.stats().drafts_trees


def test_second_request_waits_in_the_queue(small_models: dict[str, Path]) -> None:
    engine = make(small_models).engine
    for rid in ("first", "second"):
        engine.add_request(rid, [5, 6, 7], GREEDY)
    ended = {}
    while engine.has_work:
        ended.update({one.rid: one.times for one in engine.step() if one.finish_reason})
    assert ended["second"].admitted >= ended["first"].finish
