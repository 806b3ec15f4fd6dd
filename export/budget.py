"""Mixed bits: which linear gets which scheme when the mean bits per weight are given.

    harm of every linear at the coarsest scheme (measured, harm.py)  x  error of a finer scheme / error of the coarsest
    -> for every linear a few (bits, harm)  ->  the upgrades that save most harm for each bit, while the budget lasts

It counts what a step reads: layers and head. An embedding of its own is read a row at a time and has its own scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.export.harm import measure_harm
from semspec.export.packing import INFORMED_BITS, Moments, Schemes
from semspec.export.quantize import BLOCK_SIZES, Scheme, readable_embedding, scheme, stored_bits
from semspec.export.scaling import rounding_error, sample_rows
from semspec.models.decoder import head_linear, layer_linears
from semspec.models.ops import Linear, Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import ConfigError

__all__ = ["Option", "allot", "spend", "steps_for"]

HARM_TOKENS = 96  # of the ranges' text; the cost of measuring grows with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to store one linear: bits in all, and what it is expected to add to the KL in nats."""

    scheme: Scheme
    bits: float
    harm: float


def allot(
    spec: ModelSpec,
    weights: Weights,
    moments: Moments,
    ids: Sequence[int],
    schemes: Schemes,
    on_layer: Callable[[int, int], None] | None = None,
) -> Schemes:
    """`schemes` with a scheme for each linear, within schemes.bits_per_weight.

    weights: scaled as they will be rounded; moments: of what they read. ids: a text; its first HARM_TOKENS are used.
    on_layer(done, total): while harm is measured. Raises ConfigError for a budget that is too small.
    """
    head = head_linear(spec)
    linears = (*layer_linears(spec), head)
    steps = {
        linear.name: steps_for(weights.shape(linear.weights[0])[1], embeds=linear is head and spec.tied)
        for linear in linears
    }
    first = {name: own[0] for name, own in steps.items()}
    harm = measure_harm(spec, weights, list(ids[:HARM_TOKENS]), first, on_layer)
    options = {
        linear.name: _options(weights, linear, moments, steps[linear.name], harm[linear.name])
        for linear in linears
    }
    chosen = spend(options, _budget(schemes, options, sum(_n_weights(weights, linear) for linear in linears)))
    head_scheme = chosen.pop(head.name)
    return schemes.allotted(chosen, head_scheme, tied=spec.tied)


def steps_for(width: int, *, embeds: bool = False) -> tuple[Scheme, ...]:
    """int4 and int8 in the largest blocks that fill rows of `width` without padding (32 where none do).

    embeds: the matrix is also an embedding, which must be readable. Large blocks are what a step is fast with; measured
    on a pair of rows of a 0.5B: 12.9 ms, and 14.9 where bits go into blocks of 64 and 32, at 0.85 of the KL.

    >>> [str(step) for step in steps_for(576)]
    ['int4 block 64', 'int8 block 64']
    """
    size = next((size for size in reversed(BLOCK_SIZES) if _fills(size, width, embeds)), BLOCK_SIZES[0])
    steps = scheme("int4", size), scheme("int8", size)
    return tuple(step for step in steps if not embeds or readable_embedding(step, width))


def _fills(size: int, width: int, embeds: bool) -> bool:
    return width % size == 0 and (not embeds or readable_embedding(scheme("int4", size), width))


def spend(options: Mapping[str, Sequence[Option]], bits: float) -> dict[str, Scheme]:
    """Name -> scheme, such that the bits add up to no more than `bits` and the harm is small.

    options: name -> at least one, bits ascending. Upgrades that save most harm for each bit are bought first; one that
    is too dear is passed over. Raises ValueError when not even the first options fit: a bug of the caller.

    >>> coarse, fine = scheme("int4", 128), scheme("int8", 128)
    >>> lost = [Option(scheme=coarse, bits=4, harm=0.9), Option(scheme=fine, bits=8, harm=0.1)]
    >>> calm = [Option(scheme=coarse, bits=4, harm=0.2), Option(scheme=fine, bits=8, harm=0.0)]
    >>> {name: str(own) for name, own in spend({"calm": calm, "lost": lost}, 12).items()}
    {'calm': 'int4 block 128', 'lost': 'int8 block 128'}
    """
    taken = {name: own[0] for name, own in options.items()}
    left = bits - sum(option.bits for option in taken.values())
    if left < 0:
        raise ValueError(f"the coarsest options take {-left:g} bits more than {bits:g}")
    upgrades = [
        ((before.harm - after.harm) / (after.bits - before.bits), name, before, after)
        for name, own in options.items()
        for before, after in _hull(own)
    ]
    for _, name, before, after in sorted(upgrades, key=lambda upgrade: -upgrade[0]):
        # a hull's upgrades come in order; one whose forerunner was too dear would start from another scheme
        if taken[name] is before and after.bits - before.bits <= left:
            left -= after.bits - before.bits
            taken[name] = after
    return {name: option.scheme for name, option in taken.items()}


def _budget(schemes: Schemes, options: Mapping[str, Sequence[Option]], n_weights: int) -> float:
    """Bits that may be spent, at least what the first options take. Raises ConfigError for a wish below that."""
    wanted = schemes.bits_per_weight
    assert wanted is not None
    least = sum(own[0].bits for own in options.values())
    if wanted * n_weights >= least:
        return wanted * n_weights
    if wanted == INFORMED_BITS:  # the default; rows too narrow for large blocks cannot have it
        return least
    raise ConfigError(
        f"--bits-per-weight {wanted} is too few: the coarsest schemes of this model take {least / n_weights:.2f}; "
        f"raise --bits-per-weight"
    )


def _hull(options: Sequence[Option]) -> list[tuple[Option, Option]]:
    """Upgrades in order, each saving less harm for a bit than the one before; options above the hull are left out."""
    upgrades = []
    at = options[0]
    rest = list(options[1:])
    while rest:
        best = max(rest, key=lambda option: (at.harm - option.harm) / (option.bits - at.bits))
        if best.harm >= at.harm:
            break
        upgrades.append((at, best))
        at, rest = best, rest[rest.index(best) + 1 :]
    return upgrades


def _options(
    weights: Weights, linear: Linear, moments: Moments, steps: Sequence[Scheme], harm: float
) -> list[Option]:
    """Each step's bits and harm; the first has the measured one."""
    sample = sample_rows(weights, linear)
    shapes = [weights.shape(name) for name in linear.weights]
    spans = moments(linear.weights[0])
    assert spans is not None  # budgets need ranges, and those are of every linear
    size = np.diagonal(spans, axis1=1, axis2=2).reshape(-1)[: sample.shape[1]]
    errors = [rounding_error(sample, step, size) for step in steps]
    most = max(errors[0], np.finfo(np.float64).tiny)
    return [
        Option(
            scheme=step,
            bits=sum(stored_bits(step, shape) for shape in shapes),
            harm=max(harm, 0.0) * error / most,
        )
        for step, error in zip(steps, errors, strict=True)
    ]


def _n_weights(weights: Weights, linear: Linear) -> int:
    return sum(int(np.prod(weights.shape(name))) for name in linear.weights)
