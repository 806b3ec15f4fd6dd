"""What speculation would gain by the cost model of `semspec bench`, at costs that were measured here. Pure.

The model counts target passes, their rows and drafted tokens; prompts, sampling of the target's tokens and judging are
not in it. Nothing predicted was run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from semspec.calibration.bench.cost_model import Costs, predict_speed

__all__ = ["ACCEPTANCES", "SEGMENT", "best_exact", "measured_costs", "segments", "slope"]

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
SEGMENT = 31  # tokens: with the pending one a pass of 32
ROUNDS = 10_000  # of which the model counts whole tokens
FEW = 32  # rows up to which a slope is fitted


def slope(passes: Mapping[int, float]) -> float:
    """What a further row of a pass costs, in passes over one row: least squares up to FEW rows, no less than 0.

    passes: rows -> ms; two of them at least, one row among them.

    >>> round(slope({1: 10.0, 2: 11.0, 4: 13.0}), 6)
    0.1
    """
    few = sorted(size for size in passes if size <= FEW)
    per_row, _ = np.polyfit(few, [passes[size] for size in few], 1)
    return max(0.0, float(per_row) / passes[1])


def measured_costs(passes: Mapping[int, float], draft_ms: float, n_drafted: int) -> Costs:
    """Unit costs where a pass reads `n_drafted` tokens and the pending one, which must have been measured."""
    return Costs(
        draft=draft_ms / passes[1], row=max(0.0, (passes[n_drafted + 1] / passes[1] - 1) / n_drafted)
    )


def best_exact(passes: Mapping[int, float], draft_ms: float, acceptance: float) -> tuple[float, int]:
    """Speed over plain decoding under the exact token rule, and the number of drafted tokens that gives it, of those
    whose pass was measured. acceptance: chance of each token, the same for all and below 1."""

    def speed(n_drafted: int) -> float:
        a_pass = (1 - acceptance ** (n_drafted + 1)) / (1 - acceptance)
        costs = measured_costs(passes, draft_ms, n_drafted)
        return predict_speed(
            costs, generated=round(ROUNDS * a_pass), drafted=ROUNDS * n_drafted, passes=ROUNDS
        )

    return max((speed(size - 1), size - 1) for size in passes if size > 1)


def segments(passes: Mapping[int, float], draft_ms: float, acceptance: float) -> float:
    """Speed where whole segments of SEGMENT tokens are kept or written anew by the target alone, token by token.

    acceptance: share of the tokens that is kept. passes must have been measured up to SEGMENT + 1 rows.
    """
    drafted = ROUNDS * SEGMENT
    costs = measured_costs(passes, draft_ms, SEGMENT)
    rewritten = round((1 - acceptance) * drafted)
    return predict_speed(costs, generated=drafted, drafted=drafted, passes=ROUNDS + rewritten)
