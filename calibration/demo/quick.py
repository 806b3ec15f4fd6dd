"""A quick calibration: as much as a few minutes allow, and what may be shown with it.

A bound on a share needs questions, not segments, so each question has one context and there are more of them. Measured
on subsets of 450 contexts of GSM8K (1.5B/0.5B pair): 48 questions with one context each vouched for a least risk of 25,
25, 35 and 40 %, keeping 25 to 49 % of the drafted tokens, and on the other questions 12 to 26 % of what they kept was
bad. 12 questions with three contexts, which cost nearly as much, vouched for no risk up to 50 % in three of five tries.
Only linear predictors are tried, so torch is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from semspec.calibration.bench.records import Problem
from semspec.calibration.calibrate import Calibrated, CalibrateSettings, calibrate, default_work
from semspec.calibration.collection import CollectSettings
from semspec.calibration.learn import LearnSettings
from semspec.calibration.problems import generate_problems
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SpecConfig
from semspec.runtime.probe_set import ProbeSet, latest_probes, read_probes
from semspec.runtime.records import Progress

__all__ = ["QUESTIONS", "SETTINGS", "WANTED", "Shown", "calibrate_quickly", "choose_mode", "known_probes"]

QUESTIONS = 48
"""Four of each kind of problem."""

WANTED = 0.3
"""Risk that is shown where it can be vouched for."""

SETTINGS = CalibrateSettings(
    collecting=CollectSettings(n_draft=4, n_target=4, max_segments=4, n_contexts=1),
    learning=LearnSettings(
        probes=("linear",), paper_probe="linear", n_resamples=500, risks=(0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
    ),
    source=f"the first {QUESTIONS} built-in problems: a quick calibration",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How the question is answered by meaning, and in a sentence what that rests on."""

    spec: SpecConfig
    says: str


def known_probes(bundle: Path) -> ProbeSet | None:
    """Those that the bundle has; None for none. Raises as read_probes for probes that do not fit."""
    opened = Bundle.open(bundle)
    return None if latest_probes(opened) is None else read_probes(opened)


def calibrate_quickly(
    bundle: Path,
    *,
    budget: float | None = None,
    problems: list[Problem] | None = None,
    settings: CalibrateSettings = SETTINGS,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Calibrated:
    """Put probes into the bundle; interrupted, the same call goes on. budget: minutes of collecting. problems: None for
    the built-in ones. Raises as calibrate."""
    return calibrate(
        bundle,
        generate_problems(QUESTIONS) if problems is None else problems,
        default_work(bundle),
        settings,
        budget=budget,
        threads=threads,
        on_progress=on_progress,
    )


def choose_mode(found: ProbeSet, wanted: float = WANTED) -> Shown:
    """Mode `combined` at the largest risk up to the wanted one; at the least above it where there is none; the
    published rule made strict, which promises nothing, where no risk at all can be vouched for."""
    fitting = [point for point in found.risks if point.risk <= wanted]
    if not found.risks:
        return Shown(
            spec=SpecConfig(mode="semantic", preset="strict"),
            says="no risk can be vouched for, so there is no threshold: shown is preset strict, which keeps a segment "
            "where the probes find the target at least as likely to say it as the draft, and promises nothing",
        )
    point = fitting[-1] if fitting else found.risks[0]
    bad = (
        "spoiled the answer" if found.risk_of == "answer" else "had no equivalent among the target's samples"
    )
    said = (
        f"risk {point.risk:.0%}: of the segments kept on unseen questions {point.observed:.0%} {bad}, "
        f"at most {point.upper:.0%} with 95 % confidence"
    )
    if not fitting:
        said = f"a risk of {wanted:.0%} cannot be vouched for, shown is the least that can be: {said}"
    return Shown(spec=SpecConfig(mode="combined", risk=point.risk), says=said)
