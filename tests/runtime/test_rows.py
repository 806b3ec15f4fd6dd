"""Rows whose outputs stay on a device: the same tokens and signals as from all logits, which mostly are not copied.

The device is a DOUBLE: numpy arrays behind the names of a tensor, with every copy counted. Its sums are float32, as an
engine's are. Nothing about an engine's own numbers, or any speed, can be learned from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from decoding import Says, keeping, run, start
from engine_cases import NATIVE, engine_case
from judged import lines
from scripted import ScriptedModel, scattered

from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError, ConfigError
from semspec.runtime.model import CachedModel
from semspec.runtime.readings import Row, read_signals
from semspec.runtime.records import Array, Floats, Forward, Verdict
from semspec.runtime.review import Review
from semspec.runtime.rows import Outputs, TopRows
from semspec.runtime.sampling import log_probabilities

V = 200
PROMPT = [3, 4]
TARGET, DRAFT = scattered(V, seed=1, spread=6.0), scattered(V, seed=2, spread=6.0)


@dataclass(frozen=True)
class Held:
    """A tensor of the double. copied: shapes of what was copied from there."""

    values: Array
    copied: list[tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def numpy(self) -> Array:
        self.copied.append(self.shape)
        return self.values.copy()

    def part(self, index: int) -> Held:
        return Held(self.values[index], self.copied)


def outputs_of(logits: Floats, next_ids: Sequence[int], copied: list[tuple[int, ...]]) -> Outputs:
    """What a plan makes of the logits (R, V) of a pass."""
    wide, following = logits.astype(np.float64), np.array(next_ids, np.int64)
    peak = wide.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        powers = np.exp(wide - peak)
        total = powers.sum(axis=1)
        lse = np.log(total) + peak[:, 0]
        entropy = lse - (powers * wide).sum(axis=1) / total
    order = np.argsort(-logits, axis=1, kind="stable")[:, :64]
    found = {
        "logits": logits,
        "lse": lse.astype(np.float32),
        "entropy": entropy.astype(np.float32),
        "next_logits": logits[np.arange(len(logits)), following],
        "top_logits": np.take_along_axis(logits, order, axis=1),
        "top_ids": order.astype(np.int32),
    }
    held = {name: Held(values[None], copied) for name, values in found.items()}
    return Outputs(held, lambda tensor, index: cast(Held, tensor).part(index), following, lambda n_rows: None)


@dataclass(kw_only=True)
class Distant(ScriptedModel):
    """A ScriptedModel whose rows stay on the device. copied: shapes of what was copied from there."""

    copied: list[tuple[int, ...]] = field(default_factory=list)
    outputs: Outputs | None = None

    def forward(self, ids: Sequence[int], *, rows: Sequence[int] = (-1,), **options: Any) -> Forward:
        if self.outputs is not None:
            self.outputs.close()
        found = super().forward(ids, rows=rows, **options)
        following = [[*ids, 0][range(len(ids))[row] + 1] for row in rows]
        self.outputs = outputs_of(found.logits.copy(), following, self.copied)
        size = self.outputs.size
        there = TopRows(self.outputs, range(len(following)), size)
        return Forward(rows=there, states=found.states, hidden=found.hidden)

    @property
    def n_full(self) -> int:
        """Rows of logits that were copied, one by one or with all of their pass."""
        return sum(shape[1] if len(shape) == 3 else 1 for shape in self.copied if shape[-1] == V)


def decoded(kind: type[ScriptedModel], **options: Any) -> tuple[list[int], ScriptedModel, ScriptedModel]:
    """An answer, target and draft."""
    target, draft = kind(law=TARGET), kind(law=DRAFT)
    given = {"vocab_size": V, "max_tokens": 30, "seed": 5, "draft": draft, **options}
    ids, _ = run(target, PROMPT, **given)
    return ids, target, draft


FILTERED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05},
]
OPEN: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("params", [*FILTERED, *OPEN], ids=str)
@pytest.mark.parametrize("draft", [True, False], ids=["drafted", "plain"])
def test_answers_are_those_from_all_logits(params: dict[str, Any], draft: bool) -> None:
    """Same seed, same tokens: whether a law came from 64 ids or from all of them."""
    alone = {} if draft else {"draft": None}
    near, _, _ = decoded(ScriptedModel, **params, **alone)
    far, target, _ = decoded(Distant, **params, **alone)
    assert far == near
    assert isinstance(target, Distant) and target.copied


@pytest.mark.parametrize("params", FILTERED, ids=str)
def test_few_logits_are_copied_where_filters_leave_few_ids(params: dict[str, Any]) -> None:
    """What the short way is for: at most one row in three comes in full, none for greedy."""
    _, target, draft = decoded(Distant, **params)
    for model in (target, draft):
        assert isinstance(model, Distant)
        n_rows = sum(shape[1] for shape in model.copied if shape[-1] == 64) // 2  # of logits, and of ids
        assert model.n_full <= (n_rows / 3 if params else 0)


@pytest.mark.parametrize("params", OPEN, ids=str)
def test_laws_that_need_all_logits_get_them(params: dict[str, Any]) -> None:
    """Without a filter any id can be drawn; a penalty may bring up one that is not among the likeliest."""
    ids, target, _ = decoded(Distant, draft=None, **params)
    assert isinstance(target, Distant)
    assert target.n_full == len(ids)


def test_processors_see_all_logits() -> None:
    """A grammar may allow nothing but the least likely ids."""

    class Least:
        def mask(self, logits: Floats) -> Floats:
            return np.where(logits == logits.min(), logits, np.float32(-np.inf))

        def accept(self, token: int) -> None: ...

        def rollback(self, n: int) -> None: ...

    ids, target, _ = decoded(Distant, draft=None, processors=[Least()], max_tokens=5)
    assert isinstance(target, Distant) and target.n_full == 5
    expected = list(PROMPT)
    for _ in range(5):
        expected.append(int(np.asarray(TARGET(tuple(expected)), np.float32).argmin()))
    assert ids == expected[2:]


def test_log_probabilities_come_without_the_logits() -> None:
    """Of kept tokens from what the pass was told of them, of drawn ones from the likeliest."""
    options: dict[str, Any] = {"vocab_size": V, "max_tokens": 20, "logprobs": True}
    near = list(start(ScriptedModel(TARGET), PROMPT, draft=ScriptedModel(TARGET), **options))
    target = Distant(law=TARGET)
    far = list(start(target, PROMPT, draft=ScriptedModel(TARGET), **options))
    assert [step.ids for step in far] == [step.ids for step in near] and target.n_full == 0
    for ours, theirs in zip(far, near, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_signals_are_those_of_all_logits_and_padding_does_not_count() -> None:
    """What a predictor reads of a draft: any token, the likeliest or not."""
    logits = np.array([TARGET((7, place)) for place in range(6)], np.float32)
    ids = [int(row.argsort()[-1 - 40 * place]) for place, row in enumerate(logits[:5, : V - 10])]
    for n_ids in (V, V - 10):
        copied: list[tuple[int, ...]] = []
        if n_ids < V:
            logits[:, n_ids:] = 9.0  # likely, and nobody's
        rows = TopRows(outputs_of(logits, [*ids, 0], copied), range(6), V).cut(n_ids)
        far, near = read_signals(rows, ids), read_signals(map(Row, logits[:, :n_ids]), ids)
        for name in ("mean_logprob", "min_logprob", "sum_logprob", "mean_entropy", "agreement"):
            assert getattr(far, name) == pytest.approx(getattr(near, name), abs=2e-4), name
        assert rows[0].top_chance == pytest.approx(Row(logits[0, :n_ids]).top_chance, abs=1e-4)
        assert ((V,) in copied) is (n_ids < V)


def test_a_judge_may_ask_rows_or_read_all_logits() -> None:
    """And ask the target in between, which reads on: what the pass said is held for it."""
    seen: list[bool] = []

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        ranks = [row.is_among(token, 2) for row, token in zip(review.rows, review.ids, strict=False)]
        best = [row.best for row in review.rows]
        assert review.ask([5]) is not None
        assert best == review.logits.argmax(axis=1).tolist()
        order = np.argsort(-review.logits, axis=1)[:, :2]
        assert ranks == [token in pair for token, pair in zip(review.ids, order, strict=False)]
        seen.append(review.signals.agreement >= 0)
        return Verdict(keep=len(review.ids))

    options: dict[str, Any] = {"vocab_size": V, "segmenter": lines(2, 3), "max_tokens": 20}
    judge = Says(verdict=verdict)
    far = list(start(Distant(law=TARGET), PROMPT, draft=Distant(law=DRAFT), judge=judge, **options))
    plain = list(
        start(ScriptedModel(TARGET), PROMPT, draft=ScriptedModel(DRAFT), judge=keeping(True), **options)
    )
    assert seen and [step.ids for step in far] == [step.ids for step in plain]


def test_rows_are_gone_with_the_next_pass() -> None:
    """They would be read from memory that says something else by then."""
    model = Distant(law=TARGET)
    kept = model.forward([1, 2], rows=(0, 1)).rows
    held = kept.copy()
    expected = kept.logits.copy()
    model.forward([3])
    for read in (lambda: kept.logits, lambda: kept[1].best, lambda: kept[0].logits):
        with pytest.raises(ConfigError, match="gone with the model's next pass; copy what must last"):
            read()
    assert held.logits.tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_unusable_logits_are_the_engines_error(bad: float) -> None:
    """As where all are at hand; beyond the tokenizer they do not matter."""

    def law(context: tuple[int, ...]) -> Floats:
        logits = np.asarray(TARGET(context), np.float32)
        logits[150] = bad
        return logits

    for params in ({}, {"temperature": 0.7, "top_p": 0.5}):
        with pytest.raises(BackendError, match="unusable logits"):
            run(Distant(law=law), PROMPT, vocab_size=V, max_tokens=3, seed=0, **params)
        assert len(run(Distant(law=law), PROMPT, vocab_size=150, max_tokens=3, seed=0, **params)[0]) == 3


def test_a_draft_with_fewer_ids_is_read_as_it_is() -> None:
    """The chooser knows more ids than its rows have; they cannot be drawn."""
    logits = np.asarray(TARGET((1,)), np.float32)[None, :150]
    for params in ({}, {"temperature": 1.0, "top_p": 0.7}, {"temperature": 1.0}):
        chooser = Chooser(SamplingParams(**params), V, PROMPT)
        rows = TopRows(outputs_of(logits, [0], []), range(1), 150)
        far, near = chooser.law_of(rows.cut(V)[0]), chooser.law(logits[0])
        assert far.ids.tolist() == near.ids.tolist()
        np.testing.assert_allclose(far.probs, near.probs, rtol=1e-6)


# Real graphs


@pytest.fixture(scope="module", params=["primitive", NATIVE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """99 ids, 64 of them named, run by ONNX Runtime."""
    folder: Path = tmp_path_factory.mktemp("graph")
    with engine_case(folder, "llama-default-untied", request.param, "fp32").graph.open() as opened:
        yield opened


TEXT = np.random.default_rng(3).integers(0, 99, 24).tolist()


def test_a_graph_is_told_which_token_follows_each_row(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probability comes back without the row, even of a token that is among the unlikely ones; through cuts."""
    for chunk in (512, 5):
        monkeypatch.setattr(model, "_chunk", chunk)
        model.rewind(0)
        whole = model.forward(TEXT, rows=range(24)).logits.copy()
        for rows in ((1, 2, 3), (20, 22), (21, 23)):
            model.rewind(0)
            before = model.n_full_rows
            found = model.forward(TEXT, rows=rows).rows
            told = [
                row.logprob(TEXT[place + 1]) for place, row in zip(rows, found, strict=True) if place < 23
            ]
            asked = [place for place in rows if place < 23]
            expected = log_probabilities(whole[asked], [TEXT[place + 1] for place in asked])
            assert told == pytest.approx(expected, abs=1e-4)
            in_last = chunk == 512 or rows[0] >= 20
            assert model.n_full_rows - before == (0 if in_last else len(rows))


def test_rows_that_nobody_looks_at_are_not_copied(model: CachedModel) -> None:
    """Prefill; and a row's logits are copied once, alone, as the whole pass has them."""
    model.rewind(0)
    n_rows, n_full = model.n_rows, model.n_full_rows
    assert model.forward(TEXT[:20], rows=()).logits.shape == (0, 99)
    rows = model.forward(TEXT[20:], rows=range(4)).rows
    assert [row.best for row in rows] and rows[2].logits.shape == (99,)
    assert np.array_equal(rows[2].logits, rows[2].logits)
    assert (model.n_rows - n_rows, model.n_full_rows - n_full) == (4, 1)
    one = rows[2].logits.copy()
    np.testing.assert_array_equal(rows.logits[2], one)
    assert [row.best for row in rows] == rows.logits.argmax(axis=1).tolist()
    model.rewind(20)
    model.forward(TEXT[20:21])
    with pytest.raises(ConfigError, match="gone with the model's next pass"):
        assert rows.logits
