"""Names of modes."""

from __future__ import annotations

import pytest

from semspec.calibration.bench.modes import MODES, default_modes, parse_modes
from semspec.runtime.config import SpecConfig
from semspec.runtime.errors import ConfigError


def test_names_say_drafter_rule_and_length() -> None:
    """What a table calls a mode is what ran."""
    names = ["autoregressive", "lossless", "lossless-block:8", "ngram:12", "ngram-block"]
    modes = parse_modes(names)
    assert [mode.name for mode in modes] == names
    assert [mode.spec for mode in modes] == [
        SpecConfig(mode="autoregressive"),
        SpecConfig(draft="model"),
        SpecConfig(draft="model", block=True, num_draft_tokens=8),
        SpecConfig(draft="ngram", num_draft_tokens=12),
        SpecConfig(draft="ngram", block=True),
    ]
    assert all(mode.exact for mode in modes)


def test_semantic_modes_are_named_by_their_risk() -> None:
    """A name without one says which it is; at risk 0 the promise is that of exact modes; the ratio has none."""
    names = [
        "semantic",
        "combined:0.05",
        "combined:0",
        "combined-whole:0.2",
        "semantic-paper",
        "semantic-strict",
    ]
    modes = parse_modes(names)
    assert [mode.name for mode in modes] == ["semantic:0.1", *names[1:]]
    assert [mode.exact for mode in modes] == [False, False, True, False, False, False]
    assert [mode.spec for mode in modes] == [
        SpecConfig(mode="semantic", draft="model", risk=0.1),
        SpecConfig(mode="combined", draft="model", risk=0.05),
        SpecConfig(mode="combined", draft="model", risk=0),
        SpecConfig(mode="combined", draft="model", risk=0.2, adaptive="off"),
        SpecConfig(mode="semantic", draft="model", preset="paper"),
        SpecConfig(mode="semantic", draft="model", preset="strict"),
    ]


def test_every_mode_is_known_by_its_name() -> None:
    """The defaults are among them."""
    assert [mode.name for mode in parse_modes(list(MODES))] == list(MODES)
    assert set(default_modes(True)) | set(default_modes(False)) <= set(MODES)
    assert "lossless" not in default_modes(False)


RISKS = (["combined:"], ["combined:2"], ["semantic:-0.1"], ["semantic:nan"], ["semantic-paper:4"])
TWICE = (
    ["combined", "combined:0.1"],
    ["ngram", "ngram"],
    ["ngram:4", "ngram"],
    ["lossless:8", "lossless:08"],
)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["turbo"],
        [""],
        ["ngram:"],
        ["ngram:0"],
        ["ngram:x"],
        ["ngram:²"],
        ["autoregressive:4"],
        *RISKS,
        *TWICE,
    ],
)
def test_names_that_mean_nothing_or_the_same_are_refused(names: list[str]) -> None:
    """Two names for one mode would make two rows of one measurement."""
    with pytest.raises(ConfigError):
        parse_modes(names)
