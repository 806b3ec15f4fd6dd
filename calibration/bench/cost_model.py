"""The cost model: how fast a mode should be, from what it drafted and how often the target looked. Pure.

With t the time of a target pass over one row, c t that of a drafted token and k t that of each further row of a pass,
an answer of n tokens with d drafted ones and r passes of the target takes

    (r + k d + c d) t       instead of  n t,       so the speed is  n / (r + (c + k) d)

Source: arXiv 2211.17192, theorem 3.8, which has k = 0: on a device that reads weights much faster than it multiplies a
draft is read at the price of one token, on a processor it is not. The unit costs come from modes that measure them
alone, so the model is no summary of the mode that it is held against. It knows counts and times; reading the prompt,
sampling and judging are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semspec.calibration.bench.records import PLAIN, Mode, Result

__all__ = ["Costs", "measure_costs", "predict_speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In units of a target pass over one row. draft: of a drafted token (c). row: of each further row of a pass (k)."""

    draft: float
    row: float


def measure_costs(by_mode: Mapping[str, Sequence[Result]], modes: Sequence[Mode]) -> Costs | None:
    """From plain decoding (t), the draft alone (c) and the first exact mode that the draft model drafts for (k).

    None where one of them is not in the run, or says nothing. k is no less than 0, whatever the clock says.
    """
    exact = next((mode.name for mode in modes if mode.exact and mode.spec and mode.spec.draft == "model"), "")
    plain, alone, drafted = (by_mode.get(name, ()) for name in (PLAIN, "draft-alone", exact))
    step = _ratio(_ms(plain, "target"), _passes(plain))
    token = _ratio(_ms(alone, "draft"), sum(result.generated_tokens for result in alone))
    a_pass = _ratio(_ms(drafted, "target"), _passes(drafted))
    rows = _ratio(_drafted(drafted), _passes(drafted))
    if not (step and token and a_pass and rows):
        return None
    return Costs(draft=token / step, row=max(0.0, (a_pass / step - 1) / rows))


def predict_speed(costs: Costs, *, generated: int, drafted: int, passes: int) -> float:
    """Tokens/s over those of plain decoding, decoding alone. Raises ZeroDivisionError where nothing was done.

    A draft at a third of the price, four tokens a pass of which three and the target's own stay, rows for free:

    >>> round(predict_speed(Costs(draft=1 / 3, row=0.0), generated=400, drafted=400, passes=100), 2)
    1.71
    """
    return generated / (passes + (costs.draft + costs.row) * drafted)


def _ms(results: Sequence[Result], phase: str) -> float:
    return sum(result.phase_ms.get(phase, 0.0) for result in results)


def _passes(results: Sequence[Result]) -> int:
    return sum(result.num_rounds or 0 for result in results)


def _drafted(results: Sequence[Result]) -> int:
    return sum(result.num_draft_tokens or 0 for result in results)


def _ratio(part: float, whole: float) -> float:
    """0 where there is nothing to divide by."""
    return part / whole if whole else 0.0
