"""Segments and readings: what is pooled is what transformers computed there, and a sample is what it would be alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
import torch
from one_pass import read_segment
from transformers import AutoModelForCausalLM

from semspec.calibration.pair import Pair, open_pairs, rng_for
from semspec.calibration.writing import Author, Written, write_segments
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError, CalibrationError, ConfigError
from semspec.runtime.readings import Reading, Signals
from semspec.runtime.records import Floats
from semspec.runtime.sampling import greedy, sample, warp
from semspec.runtime.segments import Boundary

CONTEXT = tuple(b"Two and three, and what then?")
SAMPLING = SamplingParams(temperature=1.5, top_p=0.95)
BOUNDARY = Boundary(kind="newline", min_tokens=3, max_tokens=9)
IDS = 260  # of the tokenizer; the models have 270 rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    bundle: Path
    target: Path
    draft: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A pair of other widths: a state of the wrong model has another shape."""
    folder = tmp_path_factory.mktemp("writing")
    target = tiny_pairs.save_checkpoint(folder / "target")
    draft = tiny_pairs.save_checkpoint(folder / "draft", seed=1, hidden_size=32, num_hidden_layers=2)
    requests = tiny_pairs.request(target), tiny_pairs.request(draft)
    bundle = export_pair(*requests, folder / "bundle", tiny_pairs.settings()).path
    return Checkpoints(bundle=bundle, target=target, draft=draft)


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Iterator[Pair]:
    opened = Bundle.open(checkpoints.bundle)
    with open_pairs(opened, sampling=SAMPLING, boundary=BOUNDARY, threads=1) as (pair,):
        yield pair


def chances(seed: int, n: int) -> list[np.random.Generator]:
    return [rng_for(seed, number) for number in range(n)]


def write(pair: Pair, role: str, authors: Sequence[Author]) -> list[Written]:
    return write_segments(
        pair.models[role],
        CONTEXT,
        authors,
        segmenter=pair.segmenter,
        sampling=pair.sampling,
        n_ids=pair.n_ids(role),
    )


def truth(folder: Path, ids: Sequence[int], layers: Sequence[int]) -> Reading:
    """The reading of `ids` after CONTEXT, from one pass of transformers over all of it, in fp64 where it counts."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([[*CONTEXT, *ids]]), output_hidden_states=True)
    rows = slice(len(CONTEXT) - 1, len(CONTEXT) + len(ids) - 1)  # those that predicted the segment's tokens
    pooled = np.stack([found.hidden_states[layer][0, rows].mean(0).numpy() for layer in layers])
    laws = torch.log_softmax(found.logits[0, rows, :IDS].double(), -1)
    logprobs = laws[range(len(ids)), list(ids)]
    entropy = -(laws.exp() * laws).sum(-1)
    agreed = laws.argmax(-1) == torch.tensor(ids)
    signals = Signals(
        mean_logprob=float(logprobs.mean()),
        min_logprob=float(logprobs.min()),
        sum_logprob=float(logprobs.sum()),
        mean_entropy=float(entropy.mean()),
        agreement=float(agreed.double().mean()),
    )
    return Reading(pooled=pooled, signals=signals)


def check_same(found: Reading, expected: Reading, tolerance: float = 2e-4) -> None:
    np.testing.assert_allclose(found.pooled, expected.pooled, rtol=0, atol=tolerance)
    for name in ("mean_logprob", "min_logprob", "sum_logprob", "mean_entropy", "agreement"):
        ours, theirs = getattr(found.signals, name), getattr(expected.signals, name)
        assert ours == pytest.approx(theirs, abs=10 * tolerance), name


@pytest.mark.parametrize("chunk", [512, 2])
def test_readings_are_those_of_transformers(
    checkpoints: Checkpoints, pair: Pair, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """D43: the draft pools step by step and the target in one pass, or in chunks; both mean over the rows that
    predicted the segment. The row of the last token, which predicts what follows, is not one of them."""
    monkeypatch.setattr("semspec.runtime.model.CHUNK", chunk)
    layers = {role: pair.models[role].spec.pooled_layers for role in pair.models}
    for written in write(pair, "draft", [None, rng_for(0, "a"), rng_for(0, "b")]):
        check_same(written.reading, truth(checkpoints.draft, written.ids, layers["draft"]))
        forced = read_segment(pair.models["target"], CONTEXT, written.ids, n_ids=pair.n_ids("target"))
        check_same(forced, truth(checkpoints.target, written.ids, layers["target"]))
    for written in write(pair, "target", [None, rng_for(0, "a")]):
        check_same(written.reading, truth(checkpoints.target, written.ids, layers["target"]))


def test_an_author_reads_its_own_segment_as_anyone_would(pair: Pair) -> None:
    """Written token by token or read in one pass: the probe must not learn who did it. Signals have the same bits."""
    for written in write(pair, "target", [rng_for(1, number) for number in range(4)]):
        forced = read_segment(pair.models["target"], CONTEXT, written.ids, n_ids=pair.n_ids("target"))
        assert forced.signals == written.reading.signals
        np.testing.assert_allclose(forced.pooled, written.reading.pooled, rtol=0, atol=1e-5)


def _plainly(pair: Pair, role: str, rng: np.random.Generator | None) -> tuple[int, ...]:
    """A segment, one token after the other, all of the text read anew each time."""
    ids: list[int] = []
    model = pair.models[role]
    while pair.segmenter.length(ids) is None:
        model.rewind(0)
        logits: Floats = model.forward([*CONTEXT, *ids]).logits[0, :IDS]
        ids.append(greedy(logits) if rng is None else sample(warp(logits, pair.sampling), rng))
    return tuple(ids)


def test_samples_that_share_passes_are_those_written_alone(pair: Pair) -> None:
    """A fork that forgets to rewind, or chances that run from one sample into the next, would give other segments."""
    found = write(pair, "draft", [None, *(rng_for(2, number) for number in range(12))])
    alone = [_plainly(pair, "draft", None)]
    alone += [_plainly(pair, "draft", rng_for(2, number)) for number in range(12)]
    assert [written.ids for written in found] == alone
    assert len(set(alone)) > 1 and len({ids[0] for ids in alone}) < len(alone)  # there were forks to take
    for number in range(3):
        one = write(pair, "draft", [rng_for(2, number)])[0]
        assert one.ids == found[number + 1].ids
        assert one.reading.signals == found[number + 1].reading.signals
        check_same(one.reading, found[number + 1].reading, 1e-5)


def test_the_target_reads_the_draft_while_it_writes(
    checkpoints: Checkpoints, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are the price of calibration: fewer than there are distinct beginnings. What the target makes of its own
    segments and of the draft's has the bits of a pass of its own; pooled sums are added up in another order."""
    drafted = [written.ids for written in write(pair, "draft", [None, *chances(5, 8)])]
    model, passes = pair.models["target"], list[int]()
    forward = type(model).forward

    def count(self: Any, ids: Sequence[int], **options: Any) -> Any:
        passes.append(len(ids))
        return forward(self, ids, **options)

    monkeypatch.setattr(type(model), "forward", count)
    model.rewind(0)
    found = write(pair, "target", [None, *chances(6, 4), *drafted])
    beginnings = {written.ids[:n] for written in found for n in range(len(written.ids))}
    assert passes[0] == len(CONTEXT) - 1 and len(passes) - 1 < len(beginnings)
    assert [written.ids for written in found[5:]] == drafted
    assert [written.ids for written in found[:5]] == [
        _plainly(pair, "target", rng) for rng in [None, *chances(6, 4)]
    ]
    for written in found:
        alone = read_segment(model, CONTEXT, written.ids, n_ids=pair.n_ids("target"))
        assert alone.signals == written.reading.signals
        check_same(written.reading, alone, 1e-5)
        check_same(written.reading, truth(checkpoints.target, written.ids, model.spec.pooled_layers))


def test_what_a_model_remembers_changes_nothing(pair: Pair) -> None:
    """A run that goes on after a kill starts with empty caches, and must write the same bytes."""
    model = pair.models["draft"]
    model.rewind(0)
    first = write(pair, "draft", [rng_for(3, number) for number in range(4)])
    model.rewind(0)
    model.forward([*CONTEXT[:7], 5, 5, 5])
    second = write(pair, "draft", [rng_for(3, number) for number in range(4)])
    assert [written.ids for written in first] == [written.ids for written in second]
    for one, other in zip(first, second, strict=True):
        assert one.reading.signals == other.reading.signals
        assert np.array_equal(one.reading.pooled, other.reading.pooled)


def test_segments_end_where_the_boundary_says_and_padding_is_never_drawn(pair: Pair) -> None:
    """270 rows, 260 ids: at a high temperature an id without a token would be drawn soon."""
    for written in write(pair, "target", [rng_for(4, number) for number in range(40)]):
        assert pair.segmenter.length(written.ids) == len(written.ids)
        assert max(written.ids) < IDS


def test_states_that_are_not_finite_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, they would spoil a training hours later."""
    model = pair.models["target"]
    forward = type(model).forward

    def spoil(self: Any, ids: Sequence[int], **options: Any) -> Any:
        found = forward(self, ids, **options)
        if found.pooled is not None:
            found.pooled[0, 0] = np.nan
        return found

    monkeypatch.setattr(type(model), "forward", spoil)
    with pytest.raises(BackendError, match="not finite"):
        write(pair, "target", [None])


def test_a_pair_is_needed(tiny_bundle: Path, checkpoints: Checkpoints) -> None:
    """There is nothing to judge where no draft writes."""
    with (
        pytest.raises(CalibrationError, match="has no draft model"),
        open_pairs(Bundle.open(tiny_bundle), sampling=SAMPLING),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="backend must be one of"),
        open_pairs(Bundle.open(checkpoints.bundle), sampling=SAMPLING, backend="tpu"),
    ):
        pass
