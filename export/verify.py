"""The numerics gate: is the exported graph the model, and does it compute the same however a text is cut?

Two questions, asked of every `cpu` graph before its bundle exists. Bits: one pass, single steps, odd chunks and
a rewind after wrong tokens must agree exactly; a graph that fails is broken and refused. Quality: logits and
states against the fp32 reference on a fixed text; what is too far off is refused, the rest graded.

Not guaranteed: that another processor, or another onnxruntime, keeps the bits; the gate speaks for the machine
it ran on. 64 tokens of one text rank precisions; they do not measure a model's abilities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from semspec.export.packing import Schemes
from semspec.export.quantize import Scheme
from semspec.models.ops import Weights
from semspec.models.reference import ReferenceRun, run_reference
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats

__all__ = [
    "GATE_TOKENS",
    "LEVELS",
    "Quality",
    "check_bits",
    "closeness",
    "compare",
    "gate_text",
    "judge",
    "perplexity",
    "verify_graph",
]

GATE_TOKENS: Mapping[str, int] = {"quick": 64, "full": 512}
LEVELS = (*GATE_TOKENS, "off")
CHUNKS = (3, 5, 1, 7, 2, 6, 4)
WRONG_TOKENS = (1, 2, 3, 5, 8, 16)
FP16_PEAK = 16_000.0  # fp16 ends at 65,504; sums of a few such states leave no room above this

# coarsest precision in the graph -> (largest mean KL in nats, smallest top-1 agreement) that is still the model
LIMITS: Mapping[str, tuple[float, float]] = {"fp32": (1e-3, 0.99), "int8": (0.05, 0.93), "int4": (0.6, 0.6)}
GRADES = ((0.01, "faithful"), (0.1, "good"), (0.3, "fair"), (float("inf"), "rough"))
GOOD_GRADES = ("faithful", "good")
BETTER = {"int4": "int8", "int8": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The gate's figures over `tokens` rows of the fixed text.

    kl: mean KL(reference || graph) in nats. top1: share of rows with the same arg-max. perplexity, and that of the
    reference: of each next token of the text, exp of the mean negative log-probability. cosine: least cosine of
    any row of any pooled layer. state_peak: largest |state| of the reference, any layer. grade: kl in a word.
    better: the next better precision of the layers, where the grade leaves room for it. emulated: of numbers that were
    worked out in numpy, since no engine at hand runs the graph.
    """

    level: str
    tokens: int
    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    cosine: float
    state_peak: float
    grade: str
    better: str = ""
    emulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def verify_graph(
    model: CachedModel,
    spec: ModelSpec,
    weights: Weights,
    ids: Sequence[int],
    schemes: Schemes,
    *,
    level: str,
    on_row: Callable[[int, int], None] | None = None,
    reference: ReferenceRun | None = None,
) -> Quality:
    """Run the gate on one open graph. ids: the fixed text; its first GATE_TOKENS[level] are used (gate_text).
    reference: run_reference of them, where it is there already.

    Raises BundleError for a graph that is refused, saying why and what to do; ConfigError for a context or a
    text that is too short.
    """
    text = gate_text(ids, level, model.max_context)
    logits, states = check_bits(model, text, on_row)
    if reference is None:
        reference = run_reference(spec, weights, text, keep_states=model.spec.pooled_layers)
    quality = compare(reference, logits, states, text, level)
    option, scheme = schemes.coarsest
    judge(quality, scheme, option)
    wanting = quality.grade not in GOOD_GRADES and scheme == schemes.layers
    return replace(quality, better=BETTER.get(scheme.name, "") if wanting else "")


def gate_text(ids: Sequence[int], level: str, max_context: int) -> list[int]:
    """The tokens of the fixed text that a level reads. Raises ConfigError: the context or the text is too short."""
    count = min(GATE_TOKENS[level], max_context - max(WRONG_TOKENS))
    if count < 2:
        raise ConfigError(
            f"the gate needs a context of at least {2 + max(WRONG_TOKENS)} tokens, got {max_context}; "
            "raise --max-context, or skip the gate with --verify off"
        )
    if len(ids) < count:
        raise ConfigError(f"the gate's text has {len(ids)} tokens and {count} are needed; use --verify quick")
    return list(ids[:count])


def check_bits(
    model: CachedModel, ids: Sequence[int], on_row: Callable[[int, int], None] | None = None
) -> tuple[Floats, dict[int, Floats]]:
    """Logits (S, V) and pooled layers' states, index -> (S, E), after every way of cutting gave these bits.

    Raises BundleError naming the cut and the largest difference.
    """
    rows = range(len(ids))
    model.rewind(0)
    whole = model.forward(ids, rows=rows).logits.copy()
    states = _single_steps(model, ids, whole, on_row)
    model.rewind(0)
    at = step = 0
    while at < len(ids):
        chunk = ids[at : at + CHUNKS[step % len(CHUNKS)]]
        found = model.forward(chunk, rows=range(len(chunk))).logits
        _require_equal(found, whole[at : at + len(chunk)], f"{len(chunk)} tokens on a cache of {at}")
        at, step = at + len(chunk), step + 1
    _check_rewind(model, ids, whole)
    model.rewind(0)
    return whole, states


def compare(
    reference: ReferenceRun, logits: Floats, states: Mapping[int, Floats], ids: Sequence[int], level: str
) -> Quality:
    """Figures of a graph's logits and states, over the text `ids`, against the reference's."""
    kl, top1 = closeness(reference.logits, logits)
    cosine = min(_least_cosine(reference.states[index], state) for index, state in states.items())
    return Quality(
        level=level,
        tokens=len(logits),
        kl=kl,
        top1=top1,
        perplexity=perplexity(logits, ids),
        reference_perplexity=perplexity(reference.logits, ids),
        cosine=cosine,
        state_peak=max(reference.state_peaks),
        grade=next((word for limit, word in GRADES if kl < limit), GRADES[-1][1]),  # NaN is below nothing
    )


def closeness(reference: Floats, logits: Floats) -> tuple[float, float]:
    """Mean KL(reference || logits) in nats, and the share of rows with the same arg-max. Both (S, V)."""
    kl = float(np.mean([_kl(want, have) for want, have in zip(reference, logits, strict=True)]))
    return kl, float(np.mean(reference.argmax(axis=-1) == logits.argmax(axis=-1)))


def perplexity(logits: Floats, ids: Sequence[int]) -> float:
    """exp of the mean negative log-probability of each next token. logits: (S, V); ids: (S,), S at least 2.

    Sure of a right one, undecided between two, wrong by three to one: the geometric mean of 1, 2 and 4.

    >>> round(perplexity(np.log([[1, 1e-30], [1, 1], [3, 1], [1, 1]]), [0, 0, 0, 1]), 6)
    2.0
    """
    pairs = zip(logits[:-1], ids[1:], strict=True)
    return float(np.exp(-np.mean([_log_softmax(row.astype(np.float64))[token] for row, token in pairs])))


def judge(quality: Quality, scheme: Scheme, option: str = "--precision") -> None:
    """Refuse what is broken. scheme: the coarsest in the graph; option: what sets it.

    Raises BundleError with the figures, the limits and the next better precision.
    """
    most_kl, least_top1 = LIMITS[scheme.name]
    if not (quality.kl <= most_kl and quality.top1 >= least_top1):
        better = BETTER.get(scheme.name)
        repair = (
            f"use {option} {better}" if better else "this is a fault of semspec or of the engine: report it"
        )
        raise BundleError(
            f"the {scheme} graph is not the model any more: mean KL {quality.kl:.3g} (at most {most_kl:g}), "
            f"top-1 {quality.top1:.2f} (at least {least_top1:g}); {repair}"
        )


def check_fp16(state_peak: float, repair: str) -> None:
    """Refuse fp16 activations for a model whose states come near fp16's end. repair: what to do, for the message.
    Raises BundleError."""
    if state_peak > FP16_PEAK:
        raise BundleError(
            f"hidden states reach {state_peak:.0f} and fp16 activations are allowed up to {FP16_PEAK:.0f}; "
            f"{repair}"
        )


def _single_steps(
    model: CachedModel, ids: Sequence[int], whole: Floats, on_row: Callable[[int, int], None] | None
) -> dict[int, Floats]:
    """One token at a time; a pooled sum over one row is that row's state."""
    model.rewind(0)
    states: list[Floats] = []
    for i, token in enumerate(ids):
        found = model.forward([token], pool=np.ones(1, np.float32))
        _require_equal(found.logits[0], whole[i], f"one token on a cache of {i}")
        assert found.pooled is not None
        states.append(found.pooled.copy())
        if on_row:
            on_row(i + 1, len(ids))
    return {index: np.stack([row[k] for row in states]) for k, index in enumerate(model.spec.pooled_layers)}


def _check_rewind(model: CachedModel, ids: Sequence[int], whole: Floats) -> None:
    """After wrong tokens and a rewind the right ones give what they gave before."""
    half = len(ids) // 2
    for count in WRONG_TOKENS:
        model.rewind(half)
        model.forward([ids[(half + 7 * k) % half] for k in range(count)])
        model.rewind(half)
        found = model.forward(ids[half:], rows=range(len(ids) - half)).logits
        _require_equal(found, whole[half:], f"a rewind of {count} wrong tokens")


def _require_equal(found: Floats, expected: Floats, cut: str) -> None:
    if not np.array_equal(found, expected):
        gap = float(np.abs(found - expected).max())
        raise BundleError(
            f"the graph is not exact on this machine: logits after {cut} differ from one pass by up to {gap:.3g}; "
            "report the processor and onnxruntime's version, and try --block-size 32"
        )


def _kl(reference: Floats, found: Floats) -> float:
    """KL(softmax(reference) || softmax(found)) in nats, in double precision.

    Two to one against one to two: 2/3 ln(2/3 / 1/3) + 1/3 ln(1/3 / 2/3) = ln(2) / 3.

    >>> round(_kl(np.log([2, 1]), np.log([1, 2])), 6), round(float(np.log(2) / 3), 6)
    (0.231049, 0.231049)
    """
    want, have = (_log_softmax(row.astype(np.float64)) for row in (reference, found))
    return float(np.sum(np.exp(want) * (want - have)))


def _log_softmax(row: Any) -> Any:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _least_cosine(reference: Floats, found: Floats) -> float:
    norms = np.linalg.norm(reference, axis=-1) * np.linalg.norm(found, axis=-1)
    return float(np.min(np.sum(reference * found, axis=-1) / np.maximum(norms, 1e-30)))
