"""Requests: from a prompt and settings to what the decoding loop takes, with the models and probes of one bundle.

It knows which settings need which model, judge and reading; it decodes nothing (loop.py) and shows nothing (llm.py).
Probes are opened when first needed, and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import numpy as np

from semspec.runtime.acceptance import RULES
from semspec.runtime.backends.base import Backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.chooser import Chooser, Processor, check_processors
from semspec.runtime.config import RATIO_PRESETS, SamplingParams, SpecConfig
from semspec.runtime.drafting import Drafter, ModelDrafter, NgramDrafter
from semspec.runtime.errors import BundleError, CalibrationError, ConfigError
from semspec.runtime.features import SegmentText, segment_text
from semspec.runtime.judging import Judge, Judging, check_judge, decision_rng
from semspec.runtime.loop import Request
from semspec.runtime.model import CachedModel
from semspec.runtime.opening import model_file
from semspec.runtime.pace import Pace
from semspec.runtime.probes import Probes
from semspec.runtime.segments import Segmenter
from semspec.runtime.semantic import DEFAULT_RISK, make_judge
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch
from semspec.runtime.thinking import Thinking
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["Requests", "wants_draft"]

DOUBTFUL = 0.1  # the published rule accepts so much more than the models agree on: it keeps nearly anything

logger = logging.getLogger(__name__)


class Requests:
    """Of one bundle. draft: the model, None where it is not open."""

    def __init__(
        self, bundle: Bundle, tokenizer: Tokenizer, engine: Backend, draft: CachedModel | None
    ) -> None:
        self._bundle, self._tokenizer, self._engine, self._draft = bundle, tokenizer, engine, draft
        self._probes: Probes | None = None
        self._warned: set[str] = set()

    def close(self) -> None:
        """Release the probes. Safe to call twice."""
        if self._probes is not None:
            self._probes.close()

    def prepare(self, spec: SpecConfig) -> None:
        """Open what `spec` needs beside the models, so that what is missing is told at once. Raises CalibrationError,
        BundleError, ConfigError, BackendError."""
        if spec.semantic:
            probes = self._open_probes(spec)
            self._threshold(probes, spec)
            self._layers(probes, spec)

    def make(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        spec: SpecConfig,
        processors: Sequence[Processor],
        judge: Judge | None,
    ) -> Request:
        """Raises ConfigError for settings that do not fit together, else as `prepare`."""
        speculative = spec.mode not in ("autoregressive", "draft-alone")
        check_processors(processors, speculative=speculative)
        check_judge(judge, spec.mode)
        chooser = Chooser(params, self._tokenizer.vocab_size, ids, processors)
        watch = StopWatch(params, self._tokenizer.eos_ids, self._tokenizer.stream(ids))
        judging = None
        if judge is not None:
            judging = self._judging_from_outside(spec, judge, params, ids, watch.stop_ids)
        elif spec.semantic:
            judging = self._judging(spec, params, ids, watch.stop_ids)
        return Request(
            prompt=ids,
            chooser=chooser,
            watch=watch,
            ledger=Ledger(),
            rng=np.random.default_rng(params.seed),
            drafter=self._drafter(spec, chooser, watch.stop_ids, judging) if speculative else None,
            num_draft_tokens=spec.num_draft_tokens,
            rule=RULES["block" if spec.block else "token"],
            judging=judging,
            alone=spec.mode == "draft-alone",
            logprobs=params.logprobs,
        )

    def open_draft(self) -> CachedModel:
        """Raises ConfigError where the draft model is not open."""
        if self._draft is None:
            raise ConfigError("the draft model is not open: open the bundle with LLM(..., spec=SpecConfig())")
        return self._draft

    def _segmenter(self, stop_ids: Collection[int]) -> Segmenter:
        return Segmenter(self._bundle.manifest.boundary, self._tokenizer.token_bytes, stop_ids)

    def _judging_from_outside(
        self,
        spec: SpecConfig,
        judge: Judge,
        params: SamplingParams,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
    ) -> Judging:
        """Raises ConfigError for settings of segments where the judge takes none."""
        given = [name for name in ("adaptive", "exact_inside") if getattr(spec, name) is not None]
        if given and not judge.segments:
            raise ConfigError(f"{given[0]} is of segments, and judge {judge.name!r} takes none; leave it out")
        return Judging(
            judge=judge,
            segmenter=self._segmenter(stop_ids),
            rng=decision_rng(params.seed, prompt),
            whole_only=spec.adaptive is not None,
            exact_inside=spec.inside,
        )

    def _judging(
        self, spec: SpecConfig, params: SamplingParams, prompt: Sequence[int], stop_ids: frozenset[int]
    ) -> Judging:
        """A semantic mode's judge. A draft that ends thoughts ends there, so that what follows has another rule."""
        probes = self._open_probes(spec)
        tags = Thinking(starts=self._tokenizer.think_start_id, ends=self._tokenizer.think_end_id)
        ends = spec.thinking != "ignore" and tags.may_end(prompt, stop_ids)
        closing = tags.ends if ends else None
        judge = make_judge(spec, probes, self._threshold(probes, spec), closing=closing)
        self._warn(spec, params, probes)
        plain = self._segmenter(stop_ids)

        def describe(context: Sequence[int], ids: Sequence[int]) -> SegmentText:
            return segment_text(self._tokenizer, context, ids, plain)

        return Judging(
            judge=judge,
            segmenter=self._segmenter(stop_ids if closing is None else stop_ids | {closing}),
            rng=decision_rng(params.seed, prompt),
            whole_only=True,
            exact_inside=spec.inside,
            closing=closing,
            few_rows=judge.few_rows,
            bonus=spec.bonus,
            max_segments=spec.max_segments,
            layers=self._layers(probes, spec),
            describe=describe,
        )

    def _drafter(
        self, spec: SpecConfig, chooser: Chooser, stop_ids: Collection[int], judging: Judging | None
    ) -> Drafter:
        if not wants_draft(spec, self._draft is not None):
            if judging is not None and judging.judge.segments:
                raise ConfigError(
                    "n-grams draft no segments: this judge needs the draft model (draft='model')"
                )
            return NgramDrafter()
        draft = self.open_draft()
        by_ratio = spec.preset in RATIO_PRESETS
        probes = self._probes if spec.semantic else None
        return ModelDrafter(
            draft,
            chooser,
            stop_ids=stop_ids,
            vocab_size=draft.spec.vocab_size,
            states=probes is not None and (by_ratio or probes.needs_draft_states),
            signals=probes is not None and not by_ratio and probes.needs_draft_signals,
            pace=Pace(spec.pacing, least=spec.min_confidence, shortest=spec.num_draft_tokens),
        )

    def _open_probes(self, spec: SpecConfig) -> Probes:
        if self._probes is None:
            try:
                self._probes = Probes.open(self._bundle, self._engine)
            except (CalibrationError, BundleError) as error:
                raise type(error)(
                    f"mode {spec.mode!r} needs the bundle's probes: {error}; or use mode 'lossless'"
                ) from error
        by_ratio = spec.preset in RATIO_PRESETS
        if not (self._probes.has_ratio if by_ratio else self._probes.has_predictor):
            missing = "the two probes of the ratio" if by_ratio else "a predictor"
            raise CalibrationError(
                f"mode {spec.mode!r} with preset {spec.preset or 'calibrated'!r} needs {missing}, and "
                f"{self._probes.folder} has {', '.join(self._probes.set.names)}; calibrate it: semspec calibrate "
                f"{self._bundle.path}"
            )
        return self._probes

    @staticmethod
    def _threshold(probes: Probes, spec: SpecConfig) -> float:
        """0 where the ratio decides."""
        if spec.preset in RATIO_PRESETS:
            return 0.0
        return probes.threshold(DEFAULT_RISK if spec.risk is None else spec.risk)

    def _layers(self, probes: Probes, spec: SpecConfig) -> tuple[int, ...]:
        """Pooled states of the target's that are read of several segments in one pass: the graph sums up those of one,
        so it must return their rows. Raises ConfigError where it does not."""
        reads = spec.preset in RATIO_PRESETS or probes.needs_target_states
        if spec.max_segments == 1 or not reads:
            return ()
        _, graph = model_file(self._bundle, "target", self._engine)
        if missing := set(graph.pooled_layers) - set(graph.hidden_layers):
            needed = ",".join(map(str, sorted({*graph.pooled_layers, *graph.hidden_layers})))
            raise ConfigError(
                f"max_segments {spec.max_segments} needs the rows of states {sorted(missing)} of the target, which its "
                f"{graph.graph} graph only returns summed up; leave max_segments at 1, or export again with "
                f"--hidden-layers {needed} and calibrate"
            )
        return graph.pooled_layers

    def _warn(self, spec: SpecConfig, params: SamplingParams, probes: Probes) -> None:
        """Once each: what calibration found against this setting."""
        learnt = probes.set
        if spec.preset in RATIO_PRESETS:
            facts = learnt.ratio
            if facts is not None and facts.mean_acceptance > facts.overlap + DOUBTFUL:
                self._warn_once(
                    f"preset {spec.preset!r}: on held-out questions its ratio accepts {facts.mean_acceptance:.2f} of "
                    f"segments where the models agree on {facts.overlap:.2f}, so it keeps much that the target would "
                    f"not say"
                )
        elif learnt.temperature is not None and not _same_law(params, learnt.temperature, learnt.top_p):
            self._warn_once(
                f"the risk was measured at temperature {learnt.temperature:g}, top-p {learnt.top_p:g}; this request "
                f"has temperature {params.temperature:g}, top-p {params.top_p:g}, for which it is an estimate"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


def _same_law(params: SamplingParams, temperature: float, top_p: float | None) -> bool:
    """Whether segments are drawn as they were then; what is greedy has no use for top-p."""
    both_greedy = params.greedy and temperature == 0
    return both_greedy or (params.temperature, params.top_p) == (temperature, top_p)


def wants_draft(spec: SpecConfig, available: bool) -> bool:
    """Whether the draft model is needed; where drafts change no answer, `auto` takes it if it is there."""
    if spec.mode == "autoregressive":
        return False
    if spec.mode in ("draft-alone", "semantic", "combined"):
        return True
    return spec.draft == "model" or (spec.draft == "auto" and (available or spec.mode == "judged"))
