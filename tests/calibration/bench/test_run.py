"""The run on real bundles: what is measured, what a kill costs, and that exact modes are exact."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
from tiny_pairs import bound
from tiny_probes import add_probes

from semspec.calibration.bench.journal import CELLS, RESULTS, RUN, read_cells
from semspec.calibration.bench.modes import MODES, parse_modes
from semspec.calibration.bench.records import Problem
from semspec.calibration.bench.run import Run, run
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BundleError, CalibrationError, ConfigError
from semspec.runtime.model import CachedModel
from semspec.runtime.probes import RiskPoint

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=24)
FREE = RiskPoint(risk=1.0, threshold=0.0, coverage=1.0, observed=0.5, upper=0.6)  # keeps every segment
ASKED = (Problem(id="a", question="2+3?", answer="5"), Problem(id="b", question="Why?"))


def measure(bundle: Path, out: Path, modes: str = "autoregressive,ngram", **changes: Any) -> Run:
    """A small run."""
    given = {"problems": ASKED, "sampling": GREEDY, "threads": 1, **changes}
    problems, sampling = given.pop("problems"), given.pop("sampling")
    return run(bundle, problems, parse_modes(modes.split(",")), out, sampling, **given)


def test_exact_modes_give_the_tokens_of_the_target(bench_pair: Path, tmp_path: Path) -> None:
    """Every mode, token-wise and by block, with a draft model that is right often but not always."""
    problems = [Problem(id=str(number), question=f"{number}?") for number in range(6)]
    done = measure(bench_pair, tmp_path, ",".join([*MODES, "lossless:8"]), problems=problems)
    rows = {row.mode: row for row in done.table.rows}
    assert rows.pop("autoregressive").divergences is None
    assert {name: row.divergences for name, row in rows.items()} == dict.fromkeys(rows, 0)
    for name in ("lossless", "lossless-block", "lossless:8"):
        assert 0 < (rows[name].acceptance or 0) < 1 and (rows[name].draft_share or 0) > 0


def test_semantic_modes_are_measured_beside_exact_ones_and_controls(bench_pair: Path, tmp_path: Path) -> None:
    """One run, one journal: lossy rows have their share, at risk 0 there is no divergence."""
    bundle = bound(bench_pair, tmp_path / "bundle", min_tokens=3, max_tokens=7)
    add_probes(bundle, features=("target.mean_logprob",), risks=(FREE,))
    names = "autoregressive,lossless,combined:0,semantic:1,combined-whole:1,semantic-paper,semantic-strict,random:0.5"
    done = measure(bundle, tmp_path / "out", names, sampling=replace(GREEDY, max_tokens=60))
    rows = {row.mode: row for row in done.table.rows}
    assert list(rows) == names.split(",")
    assert rows["combined:0"].divergences == rows["lossless"].divergences == 0
    assert rows["semantic:1"].divergences is None
    lossy = {name: sum(one.n_lossy for one in done.results if one.cell.mode == name) for name in rows}
    assert lossy["semantic:1"] >= lossy["combined-whole:1"] > 0 == lossy["combined:0"] == lossy["lossless"]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_control_that_keeps_all_drafts_what_its_mode_drafts(
    bench_pair: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    """A predictor and a coin that both always say yes differ in nothing, or a comparison of them would be of drafts as
    well. Of six questions, for models that are seldom sure."""
    bundle = bound(bench_pair, tmp_path / "bundle", min_tokens=3, max_tokens=7)
    add_probes(bundle, features=("target.mean_logprob",), risks=(FREE,))
    names = "combined:1,combined-random:1,combined-whole:1,combined-whole-random:1"
    problems = [Problem(id=str(number), question=f"{number}?") for number in range(6)]
    done = measure(bundle, tmp_path / "out", names, problems=problems, sampling=sampling)
    found = [
        [
            (one.token_ids, one.num_rounds, one.num_draft_tokens, one.n_from_draft, one.n_lossy)
            for one in done.results
            if one.cell.mode == name
        ]
        for name in names.split(",")
    ]
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


def test_exact_modes_are_exact_on_a_real_model(smollm2_bundle: Path, tmp_path: Path) -> None:
    """SmolLM2 in int4: n-grams find real repetitions, and change no token."""
    question = "Repeat this line three times: the quick brown fox jumps over the lazy dog."
    problems = [
        Problem(id="fox", question=question),
        Problem(id="sum", question="What is 4 + 9?", answer="13"),
    ]
    sampling = replace(GREEDY, max_tokens=48)
    done = measure(
        smollm2_bundle, tmp_path, "autoregressive,ngram,ngram-block:8", problems=problems, sampling=sampling
    )
    rows = {row.mode: row for row in done.table.rows}
    assert rows["ngram"].divergences == rows["ngram-block:8"].divergences == 0
    assert (rows["ngram"].draft_share or 0) > 0
    assert rows["ngram"].accuracy is not None and rows["ngram"].accuracy == rows["autoregressive"].accuracy


def test_every_cell_is_measured_once_with_its_seed(bench_pair: Path, tmp_path: Path) -> None:
    """Seeds give other answers, repeats the same one again."""
    done = measure(bench_pair, tmp_path, seeds=3, repeats=2, sampling=SAMPLED)
    assert len(done.results) == len({result.cell for result in done.results}) == 2 * 2 * 3 * 2
    ids: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for result in done.results:
        cell = result.cell
        ids.setdefault((cell.problem, cell.mode, cell.seed), set()).add(result.token_ids)
        assert (result.correct is None) == (cell.problem == "b")
        assert result.generated_tokens == len(result.token_ids) and result.peak_mib > 1
    assert all(len(answers) == 1 for answers in ids.values())
    assert len({answers.pop() for key, answers in ids.items() if key[:2] == ("a", "autoregressive")}) > 1
    assert all(row.divergences is None for row in done.table.rows)


def test_no_answer_profits_from_an_earlier_one(
    bench_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second mode would find the prompt in the cache, and look faster than it is."""
    fresh, forward = [], CachedModel.forward

    def watched(self: CachedModel, *arguments: Any, **named: Any) -> Any:
        fresh.append(self.length == 0)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(CachedModel, "forward", watched)
    done = measure(bench_pair, tmp_path, "autoregressive,lossless")
    models = {"autoregressive": 1, "lossless": 2}  # each must read the prompt
    assert sum(fresh) >= sum(models[result.cell.mode] for result in done.results)


def test_a_killed_run_goes_on_and_repeats_nothing(bench_pair: Path, data_file: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: what was measured stays, byte for byte; the rest is added; then a rerun adds nothing."""
    arguments = ["bench", bench_pair, "--data", data_file, "--out", "out", "--repeats", 20]
    arguments += ["--max-tokens", 24, "--modes", "autoregressive,lossless,ngram"]
    cells, results = tmp_path / "out" / CELLS, tmp_path / "out" / RESULTS
    with commands.start("semspec", *arguments, cwd=tmp_path) as process:
        while not cells.exists() or cells.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.kill()
    kept = cells.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < 240 and not results.exists()
    assert commands.run("semspec", *arguments, cwd=tmp_path).status == 0
    assert cells.read_bytes().startswith(kept)
    assert set(Counter(result.cell for result in read_cells(cells)).values()) == {1}
    assert len(read_cells(cells)) == 240
    first, journal = results.read_bytes(), cells.read_bytes()
    again = commands.run("semspec", *arguments, cwd=tmp_path)
    assert again.status == 0 and (results.read_bytes(), cells.read_bytes()) == (first, journal)


def test_the_same_journal_gives_the_same_bytes(bench_pair: Path, tmp_path: Path) -> None:
    """Killed after its last cell, before its end: results.json is what it would have been."""
    measure(bench_pair, tmp_path / "one", sampling=SAMPLED, seeds=2)
    (tmp_path / "two").mkdir()
    for name in (RUN, CELLS):
        shutil.copy(tmp_path / "one" / name, tmp_path / "two" / name)
    with (tmp_path / "two" / CELLS).open("ab") as file:
        file.write(b'{"cell":{"problem":"a","se')
    measure(bench_pair, tmp_path / "two", sampling=SAMPLED, seeds=2)
    for name in (RUN, CELLS, RESULTS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"repeats": 2},
        {"modes": "autoregressive"},
        {"sampling": replace(GREEDY, max_tokens=25)},
        {"problems": (ASKED[0], replace(ASKED[1], question="How?"))},
        {"shard": (1, 2)},
        {"threads": 2},
    ],
)
def test_changed_settings_are_refused(bench_pair: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Two settings in one table are no measurement; the folder is left as it was."""
    measure(bench_pair, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="another run"):
        measure(bench_pair, tmp_path, **changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_bundle_is_refused(bench_pair: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    """The same name may hold other weights: the manifest's hash tells."""
    measure(bench_pair, tmp_path)
    with pytest.raises(ConfigError, match=r"settings\.bundle_sha256"):
        measure(tiny_bundle, tmp_path)


def test_edited_results_are_not_overwritten(bench_pair: Path, tmp_path: Path) -> None:
    """results.json is never replaced, whatever it says."""
    measure(bench_pair, tmp_path)
    (tmp_path / RESULTS).write_text("{}", encoding="utf-8")
    with pytest.raises(CalibrationError, match="not overwritten"):
        measure(bench_pair, tmp_path)
    assert (tmp_path / RESULTS).read_text("utf-8") == "{}"


def test_results_hold_table_origin_and_every_answer(bench_pair: Path, tmp_path: Path) -> None:
    """One file to quote from: what, on what, and all that came out."""
    done = measure(bench_pair, tmp_path)
    content = json.loads((tmp_path / RESULTS).read_text("utf-8"))
    assert content["origin"]["settings"]["models"]["target"]["layers"] == "fp32"
    assert content["origin"]["machines"][0]["cores"] >= 1
    assert [row["mode"] for row in content["table"]["rows"]] == ["autoregressive", "ngram"]
    assert [one["token_ids"] for one in content["results"]] == [list(one.token_ids) for one in done.results]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 2}, "every seed gives the same answer"),
        ({"sampling": replace(GREEDY, seed=1)}, "leave it out"),
        ({"shard": (2, 1)}, "from 1 to n"),
        ({"shard": (1, 3)}, "cannot be split"),
        ({"repeats": 0}, "at least 1"),
        ({"problems": (ASKED[0], ASKED[0])}, "the same id"),
        ({"backend": "tpu"}, "tpu"),
        ({"problems": (Problem(id="long", question="x" * 300),)}, r"'long' has \d+ tokens"),
        ({"problems": (Problem(id="odd", question="x", answer="{"),)}, "'odd': the answer"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_measured(
    bench_pair: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Not after the first hour."""
    with pytest.raises((ConfigError, CalibrationError), match=message):
        measure(bench_pair, tmp_path / "out", **changes)
    assert not read_cells(tmp_path / "out" / CELLS)


def test_a_mode_without_its_model_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    """`lossless` means the draft model; n-grams in its place would be another mode under its name."""
    with pytest.raises((BundleError, ConfigError)):
        measure(tiny_bundle, tmp_path, "autoregressive,lossless")
