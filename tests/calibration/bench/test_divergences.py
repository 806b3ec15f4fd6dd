"""Divergences of exact modes: found where nothing was left to chance, with the target's own margin at the place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted
import torch
from bench_results import origin, result
from transformers import AutoModelForCausalLM

from semspec.calibration.bench.answering import chat_of
from semspec.calibration.bench.divergences import Divergence, find_divergences, measure_margins
from semspec.calibration.bench.join import join
from semspec.calibration.bench.journal import (
    CELLS,
    DIVERGENCES,
    RESULTS,
    RUN,
    Journal,
    read_cells,
    read_divergences,
)
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import PLAIN, Cell, Mode, Problem, Result
from semspec.calibration.bench.run import Run, run
from semspec.calibration.bench.summary import summarize
from semspec.runtime.acceptance import RULES
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import BackendError, CalibrationError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Verdict
from semspec.runtime.tokenizer import Tokenizer

MODES = parse_modes([PLAIN, "ngram"])
ASKED = tuple(Problem(id=name, question=f"{name}?") for name in ("aa", "abab", "cc", "dd"))


def found(results: Sequence[Result], modes: Sequence[Mode] = MODES, **how: bool) -> list[Divergence]:
    return list(find_divergences(results, summarize(results, modes, **{"greedy": True, **how})))


def test_place_and_tokens_around_it_are_named() -> None:
    """Where the search for the fault begins; the count is the table's."""
    ids = tuple(range(100, 140))
    early, late = (1, *ids[1:]), (*ids[:20], 7, *ids[21:])
    answers = {("p0", 0): early, ("p0", 1): ids, ("p1", 0): late, ("p1", 1): ids[:30]}
    results = [result(p, "ngram", repeat=n, token_ids=mine) for (p, n), mine in answers.items()]
    results += [result(p, PLAIN, repeat=n, token_ids=ids) for p, n in answers]
    first, second, third = found(results)
    assert (first.cell, first.position, first.start) == (
        Cell(problem="p0", mode="ngram", seed=0, repeat=0),
        0,
        0,
    )
    assert (second.problem, second.position, second.start) == ("p1", 20, 16)
    assert second.plain_ids == tuple(range(116, 125)) and second.ids[4] == 7
    assert (third.repeat, third.position, third.ids) == (1, 30, tuple(range(126, 130)))  # it ended there
    assert summarize(results, MODES, greedy=True).rows[1].divergences == 3


def test_chance_and_lossy_modes_do_not_diverge() -> None:
    """Exact under sampling means the same law; a mode that promises no tokens cannot break the promise."""
    lossy = Mode(name="hasty", exact=False, spec=SpecConfig(draft="ngram"))
    assert not found([result("p"), result("p", "ngram", token_ids=(1, 2))], greedy=False)
    assert not found([result("p"), result("p", "hasty", token_ids=(1, 2))], [MODES[0], lossy])


def test_margin_is_the_targets_preference_at_the_place() -> None:
    """Worked by hand: token i is followed by i+1 with logit 9, by 0 with logit 2.5. One pass for each, from empty."""
    table = np.full((8, 8), -1.0)
    table[np.arange(7), np.arange(1, 8)], table[:, 0] = 9.0, 2.5
    model = scripted.ScriptedModel(scripted.chain(table))
    plain = (3, 4, 5, 6)
    answers = [(3, 4, 0, 1), (5, 6, 7, 0), (3, 4)]
    results = [result("p", "ngram", repeat=n, token_ids=ids) for n, ids in enumerate(answers)]
    results += [result("p", PLAIN, repeat=n, token_ids=plain) for n, _ in enumerate(answers)]
    known = {one.cell: one for one in results}
    measured = list(measure_margins(model, found(results), known, {"p": [1, 2]}))
    assert [one.margin for one in measured] == [6.5, 10.0, None]  # None: it only ended earlier
    assert model.calls == [(0, (1, 2, 3, 4)), (0, (1, 2))]


@pytest.mark.parametrize(
    ("value", "token", "error", "message"),
    [
        (np.nan, 1, BackendError, "not numbers"),
        (0.0, 9, CalibrationError, "token 9 and the target has 0 to 1"),
    ],
)
def test_a_margin_that_is_no_number_is_an_error(
    value: float, token: int, error: type[Exception], message: str
) -> None:
    """NaN is not JSON, and an id from a journal that somebody edited is not the model's."""
    results = [result("p", token_ids=(0,)), result("p", "ngram", token_ids=(token,))]
    model = scripted.ScriptedModel(scripted.chain(np.full((2, 2), value)))
    with pytest.raises(error, match=message):
        list(measure_margins(model, found(results), {one.cell: one for one in results}, {"p": [0]}))


@pytest.mark.parametrize("margin", [None, 0.0, -0.1, float(np.float32(1 / 3))])
def test_a_line_is_read_back_as_it_was(margin: float | None) -> None:
    """Shards keep their margins in these lines; half a surrogate pair in an id of the data must not stop them."""
    (one,) = found([result("p\ud800é"), result("p\ud800é", "ngram", token_ids=(1, 3))])
    one = replace(one, margin=margin)
    assert Divergence.from_json(one.to_json()) == one and one.to_json().isascii()


@pytest.mark.parametrize(
    "line",
    ["{}", "[]", "x", "[" * 100_000, '{"margin": 1}', '{"margin": NaN}', '{"margin": 0.5, "problem": 1}'],
)
def test_a_damaged_file_names_its_line_and_the_repair(tmp_path: Path, line: str) -> None:
    """Torn by hand, or of an earlier version: removing it costs a pass a divergence."""
    (one,) = found([result("p"), result("p", "ngram", token_ids=(1, 3))])
    path = tmp_path / DIVERGENCES
    path.write_text(f"{one.to_json()}\n{line}\n", encoding="ascii")
    with pytest.raises(CalibrationError, match=r"line 2 is damaged .* remove the file and run"):
        read_divergences(path)


# Runs with a rule that is wrong on purpose


def measure(bundle: Path, out: Path, **changes: Any) -> Run:
    sampling = SamplingParams(max_tokens=16)
    return run(bundle, ASKED, MODES, out, sampling, threads=1, **changes)


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that keeps every draft: what an exact mode must never do."""

    def keep_all(ids: Sequence[int], draft: Any, target: Sequence[Any], rng: np.random.Generator) -> Verdict:
        law = target[len(ids)]
        return Verdict(keep=len(ids), extra=int(law.ids[np.argmax(law.probs)]))

    monkeypatch.setitem(RULES, "token", keep_all)  # type: ignore[arg-type]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the passes that read a prompt from empty and want its last row: those of the margins only."""
    seen: list[int] = []
    forward = CachedModel.forward

    def watched(self: CachedModel, ids: Sequence[int], **named: Any) -> Any:
        if self.length == 0 and "rows" not in named:
            seen.append(len(ids))
        return forward(self, ids, **named)

    monkeypatch.setattr(CachedModel, "forward", watched)
    return seen


def test_margins_of_a_wrong_rule_are_those_of_the_checkpoint(
    bench_pair: Path, tmp_path: Path, credulous: None, passes: list[int]
) -> None:
    """Held against transformers on the very weights: above 0, for plain decoding takes the likeliest token."""
    done = measure(bench_pair, tmp_path)
    assert done.divergences and len(passes) == len(done.divergences) == done.table.rows[1].divergences
    model = AutoModelForCausalLM.from_pretrained(bench_pair.parent / "target", dtype=torch.float32)
    tokenizer = Tokenizer.open(bench_pair / "tokenizer")
    plain = {one.cell.problem: one.token_ids for one in done.results if one.cell.mode == PLAIN}
    asked = {problem.id: problem for problem in ASKED}
    for one in done.divergences:
        ids = [*tokenizer.encode_chat(chat_of(asked[one.problem])), *plain[one.problem][: one.position]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        place = one.position - one.start
        expected = float(logits[one.plain_ids[place]] - logits[one.ids[place]])
        assert one.margin == pytest.approx(expected, abs=1e-4) and one.margin > 0
    lines = (tmp_path / DIVERGENCES).read_text("ascii").splitlines()
    assert [json.loads(line)["margin"] for line in lines] == [one.margin for one in done.divergences]


def test_margins_are_measured_once(
    bench_pair: Path, tmp_path: Path, credulous: None, passes: list[int]
) -> None:
    """A rerun gives the same bytes without a pass; killed before its end, the run measures what was lost."""
    first = measure(bench_pair, tmp_path / "one")
    n_passes = len(passes)
    assert measure(bench_pair, tmp_path / "one").divergences == first.divergences and len(passes) == n_passes
    (tmp_path / "two").mkdir()
    for name in (RUN, CELLS):
        shutil.copy(tmp_path / "one" / name, tmp_path / "two" / name)
    measure(bench_pair, tmp_path / "two")
    assert len(passes) == 2 * n_passes > 0
    for name in (RUN, CELLS, DIVERGENCES, RESULTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_margins_of_shards_are_joined_without_the_bundle(
    bench_pair: Path, tmp_path: Path, credulous: None, passes: list[int]
) -> None:
    """Those of the run that was never split; machines that only join need no engine."""
    whole = measure(bench_pair, tmp_path / "whole")
    shards = [tmp_path / str(index) for index in (1, 2)]
    for index, folder in enumerate(shards, start=1):
        measure(bench_pair, folder, shard=(index, 2))
    n_passes = len(passes)
    joined = join(shards, tmp_path / "joined")
    assert joined.divergences == whole.divergences and len(passes) == n_passes
    assert (tmp_path / "joined" / DIVERGENCES).read_bytes() == (tmp_path / "whole" / DIVERGENCES).read_bytes()


def test_where_nothing_diverges_no_pass_is_run(bench_pair: Path, tmp_path: Path, passes: list[int]) -> None:
    """The usual end of a run: an empty file, and the model is not opened again."""
    assert measure(bench_pair, tmp_path).divergences == ()
    assert (tmp_path / DIVERGENCES).read_bytes() == b"" and passes == []


def test_margins_of_other_answers_are_refused(bench_pair: Path, tmp_path: Path) -> None:
    """A file that somebody changed is neither believed nor overwritten; a shard without it is not joined."""
    measure(bench_pair, tmp_path / "one", shard=(1, 2))
    measure(bench_pair, tmp_path / "two", shard=(2, 2))
    (one,) = found([result("aa"), result("aa", "ngram", token_ids=(1, 3))])
    (tmp_path / "one" / DIVERGENCES).write_text(f"{one.to_json()}\n", encoding="ascii")
    with pytest.raises(CalibrationError, match="not overwritten"):
        measure(bench_pair, tmp_path / "one", shard=(1, 2))
    (tmp_path / "one" / DIVERGENCES).unlink()
    with pytest.raises(CalibrationError, match="missing; run it to its end"):
        join([tmp_path / "one", tmp_path / "two"], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_joined_divergence_needs_its_margin(tmp_path: Path) -> None:
    """A journal that was changed after its shard ended: its margins are not guessed."""
    shard = tmp_path / "shard"
    with Journal(shard, origin(problems=("a",))) as journal:
        journal.append(result("a"))
        journal.append(result("a", "ngram", token_ids=(1, 3)))
    (shard / DIVERGENCES).write_text("")
    with pytest.raises(CalibrationError, match="no shard has the margin of a/ngram/0/0"):
        join([shard], tmp_path / "out")
    assert len(read_cells(shard / CELLS)) == 2 and not (tmp_path / "out").exists()
