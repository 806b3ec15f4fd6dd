"""Rounded inputs: channel scales that share out the difficulty between inputs and weights, and the inputs' steps.

Every input channel is divided by s, its weights are multiplied by s, folded as in scaling.py. Source: SmoothQuant,
arXiv 2211.10438; its exponent is chosen here for each linear, by the error that both roundings add to the output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from semspec.export.qdq_weights import LARGEST
from semspec.export.ranges import LinearRanges, Ranges
from semspec.export.scaling import Folding, folding_of, over_groups, sample_rows
from semspec.models.decoder import layer_linears
from semspec.models.ops import Linear, Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.records import Floats

__all__ = ["choose_smoothing", "input_scales"]

EXPONENTS = tuple(step / 20 for step in range(21))
SMALLEST = 1e-6  # of the largest channel: what less counts as


def choose_smoothing(
    spec: ModelSpec, weights: Weights, ranges: Ranges, on_linear: Callable[[int, int], None] | None = None
) -> Folding:
    """The scales with which int8 inputs, one step for all, and int8 weights, a step a row, add least to the outputs.

    Tried for each linear: s = max |x|^a / max |w|^(1 - a) for a in 0, 0.05 .. 1, and no scaling. The weights are a
    sample of rows. on_linear(done, total).
    """

    def scale_of(linear: Linear) -> Floats:
        found = ranges.linears[linear.name]
        peaks = over_groups(spec, linear, found.abs_max, np.max)
        return _best_scale(spec, linear, sample_rows(weights, linear), peaks, found)

    return folding_of(spec, scale_of, on_linear)


def input_scales(
    spec: ModelSpec, ranges: Ranges, kind: str, folding: Folding | None = None
) -> dict[str, float]:
    """Linear.name -> what one step of its rounded input stands for, `kind` `int8`, `fp8` or `fp4`; after the folding.

    The largest number measured is the largest that can be told; beyond it inputs are cut off. Of fp4 it is the
    scale of the scales: a block with the largest number has the largest fp8 scale.
    """
    most = LARGEST["fp4"] * LARGEST["fp8"] if kind == "fp4" else LARGEST[kind]
    scales = {}
    for linear in layer_linears(spec):
        peaks = ranges.linears[linear.name].abs_max
        if folding is not None:
            peaks = peaks / folding.inputs[linear.name]
        scales[linear.name] = (float(peaks.max()) or 1.0) / most
    return scales


def _best_scale(
    spec: ModelSpec, linear: Linear, sample: Floats, peaks: Floats, found: LinearRanges
) -> Floats:
    """sample: (rows, E); peaks: (E,), max |x|, the same within a group of heads."""
    columns = over_groups(spec, linear, np.abs(sample).max(axis=0), np.max)
    strong, heavy = (np.maximum(size, max(SMALLEST * float(size.max()), 1e-30)) for size in (peaks, columns))
    best, least = np.ones_like(strong), _error(sample, found.abs_max, found.second_moment)
    for exponent in EXPONENTS:
        scale = np.divide(strong ** np.float32(exponent), heavy ** np.float32(1 - exponent), dtype=np.float32)
        scale /= np.sqrt(float(scale.max()) * float(scale.min()))
        moment = np.divide(found.second_moment, np.square(scale), dtype=np.float32)
        error = _error(sample * scale, np.divide(found.abs_max, scale, dtype=np.float32), moment)
        if error < least:
            best, least = scale, error
    return best


def _error(weight: Floats, peaks: Floats, moment: Floats) -> float:
    """Mean square that both roundings add to the outputs of the sample, but for a factor; errors are even over a step.

    weight: (rows, E); peaks, moment: (E,), of |x| and x^2.
    """
    of_inputs = float(np.square(peaks.max())) * float(np.vdot(weight, weight))
    of_weights = float(np.square(np.abs(weight).max(axis=1)).sum()) * float(moment.sum())
    return of_inputs + of_weights
