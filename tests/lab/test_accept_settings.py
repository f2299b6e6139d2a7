"""Settings out of flags and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.lab.accept.settings import check_names, parse_setting, read_settings

BASE = SpecConfig(num_draft_tokens=6)


def test_a_setting_as_a_flag() -> None:
    one = parse_setting(
        "chain of 5: algorithm=EAGLE3 draft_model_path='my drafts/a' speculative_num_steps=5 "
        "draft_sampling=true num_draft_tokens=none",
        BASE,
    )
    assert one.name == "chain of 5"
    assert one.spec == SpecConfig(
        algorithm="EAGLE3", draft_model_path="my drafts/a", num_steps=5, draft_sampling=True
    )
    assert one.given == {
        "algorithm": "EAGLE3",
        "draft_model_path": "my drafts/a",
        "num_steps": 5,
        "draft_sampling": True,
    }


def test_what_is_left_out_is_as_the_flags_say() -> None:
    assert parse_setting("plain:", BASE).spec == BASE
    assert parse_setting("n: algorithm=NGRAM", BASE).spec.num_draft_tokens == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm=NGRAM", "give a name and options"),
        (": algorithm=NGRAM", "give a name and options"),
        ("a: NGRAM", "'NGRAM' is not of the form OPTION=VALUE"),
        ("a: num_stepz=3", "there is no option 'num_stepz'; did you mean num_steps"),
        ("a: num_steps=many", "--setting a: num_steps must be a whole number, got 'many'"),
        ("a: num_steps=0", "num-steps 0: must be at least 1"),
        ("a: draft_model_path='x", "No closing quotation"),
    ],
)
def test_settings_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_setting(text, BASE)


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("n-gram:\n  algorithm: NGRAM\n  ngram_min_match: 1\nplain:\n")
    first, second = read_settings(path, BASE)
    assert first.spec == SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6)
    assert (second.name, second.spec) == ("plain", BASE)
    path.write_text("- {name: n-gram, algorithm: NGRAM, ngram_min_match: 1}\n- {name: plain}\n")
    assert read_settings(path, BASE) == [first, second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- algorithm: NGRAM\n", "list of settings, each with a `name`"),
        ("n-gram: NGRAM\n", "n-gram must be a mapping"),
        ("a: {num_steps: x}\n", "a: num_steps must be a whole number"),
        ("a: [", "cannot read --settings"),
        ("3\n", "list of settings"),
    ],
)
def test_files_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_settings(path, BASE)
    with pytest.raises(ConfigError, match="cannot read --settings"):
        read_settings(tmp_path / "absent.yaml", BASE)


def test_names_tell_settings_apart() -> None:
    one = parse_setting("a: algorithm=NGRAM", BASE)
    check_names([one])
    with pytest.raises(ConfigError, match="two settings are called 'a'"):
        check_names([one, one])
    with pytest.raises(ConfigError, match="nothing to measure"):
        check_names([])
