"""Duels: a semantic mode against what it has to beat, on the same problems of one run.

Its speed is held against the exact mode with the draft model; its right answers against the controls that draft as it
does and decide otherwise. That is fair only where both keep about as many lossy tokens, so their shares stand beside
the gain. Pure: it knows results and modes, no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.bench.controls import AfterExact, AtRandom, ByGrade, ByLogprob
from semspec.calibration.bench.estimates import Estimate, by_problem, estimate, paired, right, speed
from semspec.calibration.bench.records import Mode, Result
from semspec.runtime.config import SpecConfig

__all__ = ["Duel", "problems_to_decide", "set_duels"]

CONTROLS_OF = {"combined": (AfterExact,), "semantic": (AtRandom, ByLogprob, ByGrade)}
"""A semantic mode -> the rules of its controls. Those of `semantic` let the target write plainly what they refuse, as
published, and are slower for that."""
QUANTILES = 1.959964 + 0.841621  # of the normal law: two-sided 95 %, and 80 % chance of seeing it


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A mode against a rival, over the problems that both answered.

    speed: median of the mode's tokens/s over the rival's. gain: mean of right answers, the mode's less the rival's;
    None without known answers. only_mode, only_rival: problems with more right answers of one than of the other.
    lossy, rival_lossy: shares of lossy tokens. to_decide: problems_to_decide of the gain.
    """

    mode: str
    rival: str
    n_problems: int
    speed: Estimate
    gain: Estimate | None
    only_mode: int
    only_rival: int
    lossy: float
    rival_lossy: float
    to_decide: int | None


def set_duels(by_mode: Mapping[str, Sequence[Result]], modes: Sequence[Mode]) -> tuple[Duel, ...]:
    """Each semantic mode that is lossy against the first exact mode with the draft model, then against its controls, as
    far as they are in the run."""
    exact = [mode for mode in modes if mode.exact and mode.spec is not None and mode.spec.draft == "model"]
    duels = []
    for mode in modes:
        if not mode.lossy or mode.spec is None or mode.spec.mode not in CONTROLS_OF:
            continue
        for rival in [*exact[:1], *(other for other in modes if _is_control(other, mode.spec))]:
            duel = _duel(mode.name, by_mode[mode.name], rival.name, by_mode[rival.name])
            duels += [] if duel is None else [duel]
    return tuple(duels)


def problems_to_decide(differences: Sequence[float]) -> int | None:
    """Problems after which an interval around a mean difference this large would, with 80 % chance, exclude 0.

    A normal approximation from these problems' own spread; None where the mean is 0 or all are the same.

    Of 8 problems one rule is right on two that the other misses, and wrong on one: mean 1/8, standard deviation 0.641,
    and (2.80 * 0.641 * 8) ** 2 = 206.3.

    >>> problems_to_decide([1, 1, -1, 0, 0, 0, 0, 0])
    207
    """
    if len(differences) < 2:
        return None
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if mean == 0 or spread == 0:
        return None
    return math.ceil((QUANTILES * spread / mean) ** 2)


def _is_control(rival: Mode, spec: SpecConfig) -> bool:
    """Whether it is asked at the same places, about drafts that end in the same way."""
    alike = rival.spec is not None and rival.spec.pacing == spec.pacing
    return alike and isinstance(rival.control, CONTROLS_OF[spec.mode])


def _duel(name: str, ours: Sequence[Result], rival: str, theirs: Sequence[Result]) -> Duel | None:
    """None where no problem is answered by both."""
    speeds = paired(np.divide, by_problem(ours, speed, np.median), by_problem(theirs, speed, np.median))
    faster = estimate(speeds, np.median)
    if faster is None:
        return None
    gains = paired(np.subtract, by_problem(ours, right, np.mean), by_problem(theirs, right, np.mean))
    return Duel(
        mode=name,
        rival=rival,
        n_problems=len(speeds),
        speed=faster,
        gain=estimate(gains, np.mean),
        only_mode=sum(gain > 0 for gain in gains),
        only_rival=sum(gain < 0 for gain in gains),
        lossy=_lossy(ours),
        rival_lossy=_lossy(theirs),
        to_decide=problems_to_decide(gains),
    )


def _lossy(results: Sequence[Result]) -> float:
    return sum(one.n_lossy for one in results) / max(sum(one.generated_tokens for one in results), 1)
