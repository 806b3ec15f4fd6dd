"""Ways to decode by name, such as `lossless-block:8`: drafter, rule and, after the colon, most tokens of a draft.

    semantic:0.1, combined:0.1    a semantic mode at this risk; 0 is exact
    combined-whole:0.1            without stopping where the draft is unsure
    semantic-paper, -strict       by the ratio of the two probes, as published and without chance

The names of lossy controls, such as `random:0.7`, are those of controls.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from semspec.calibration.bench.controls import CONTROLS, parse_control
from semspec.calibration.bench.records import PLAIN, Mode
from semspec.runtime.config import RATIO_PRESETS, SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.semantic import DEFAULT_RISK

__all__ = ["MODES", "default_modes", "parse_modes"]


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(name=PLAIN, exact=True, spec=SpecConfig(mode="autoregressive")),
        Mode(name="lossless", exact=True, spec=SpecConfig(draft="model")),
        Mode(name="lossless-block", exact=True, spec=SpecConfig(draft="model", block=True)),
        Mode(name="ngram", exact=True, spec=SpecConfig(draft="ngram")),
        Mode(name="ngram-block", exact=True, spec=SpecConfig(draft="ngram", block=True)),
    )
}
"""The exact ones."""

BY_RISK: Mapping[str, SpecConfig] = {
    "semantic": SpecConfig(mode="semantic", draft="model"),
    "combined": SpecConfig(mode="combined", draft="model"),
    "combined-whole": SpecConfig(mode="combined", draft="model", adaptive="off"),
}
BY_RATIO: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name=f"semantic-{preset}",
            exact=False,
            spec=SpecConfig(mode="semantic", draft="model", preset=preset),
        )
        for preset in RATIO_PRESETS
    )
}


def default_modes(has_draft: bool) -> tuple[str, ...]:
    """Plain decoding, the draft model where there is one, and n-grams."""
    return (PLAIN, "lossless", "ngram") if has_draft else (PLAIN, "ngram")


def parse_modes(names: Sequence[str]) -> list[Mode]:
    """Modes in the order named. Raises ConfigError for none, an unknown one, one named twice, a length that is not.

    >>> [mode.spec.num_draft_tokens for mode in parse_modes(["ngram:8", "lossless"])]
    [8, 4]
    """
    modes = [_parse(name.strip()) for name in names]
    if not modes:
        raise ConfigError(f"no modes to measure; known: {', '.join(MODES)}")
    seen = [replace(mode, name="") for mode in modes]
    for index, mode in enumerate(modes):
        if seen[index] in seen[:index]:
            raise ConfigError(f"the mode {mode.name} is named twice (the default draft has 4 tokens)")
    return modes


def _parse(name: str) -> Mode:
    if control := parse_control(name):
        return control
    known, colon, length = name.partition(":")
    if known in BY_RISK:
        return _at_risk(known, length if colon else repr(DEFAULT_RISK))
    if name in BY_RATIO:
        return BY_RATIO[name]
    if known not in MODES:
        raise ConfigError(
            f"unknown mode {name!r}; known: {', '.join(MODES)}, with a draft length as in ngram:8; "
            f"{', '.join(BY_RISK)}, with a risk as in combined:0.1; {', '.join(BY_RATIO)}; and the controls "
            f"{', '.join(CONTROLS)}"
        )
    mode = MODES[known]
    if not colon or mode.spec is None:
        return mode
    if known == PLAIN or not (length.isascii() and length.isdigit()) or int(length) == 0:
        raise ConfigError(
            f"a draft length is a whole number from 1 after a drafting mode, as in ngram:8; got {name!r}"
        )
    spec = SpecConfig(draft=mode.spec.draft, block=mode.spec.block, num_draft_tokens=int(length))
    return Mode(name=f"{known}:{int(length)}", exact=mode.exact, spec=spec)


def _at_risk(mode: str, written: str) -> Mode:
    """A semantic mode by its risk."""
    try:
        risk = float(written)
    except ValueError:
        risk = -1.0
    if not 0 <= risk <= 1:
        raise ConfigError(f"a risk is a number from 0 to 1, as in {mode}:0.1; got '{mode}:{written}'")
    risk += 0.0  # no minus at 0
    name = f"{mode}:{repr(risk).removesuffix('.0')}"
    return Mode(name=name, exact=risk == 0, spec=replace(BY_RISK[mode], risk=risk))
