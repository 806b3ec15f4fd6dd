"""`semspec demo` as a user runs it, from an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_pairs
import tiny_probes
from commands import one_line, run

from semspec.export.pipeline import export_pair
from semspec.export.recipes import load_recipe
from semspec.runtime.bundle import Bundle
from semspec.runtime.probe_set import latest_probes

NOT_NEEDED = ("torch", "transformers", "optimum", "math_verify", "ray", "sklearn")


@pytest.fixture(scope="module")
def named_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair under the names of the demo's, with room for its questions in bytes and short segments."""
    folder, pair = tmp_path_factory.mktemp("named"), load_recipe("qwen2.5-coder")
    assert pair.draft is not None
    certain = {
        "initializer_range": 0.8,
        "max_position_embeddings": 1024,
    }  # samples at temperature 0.6 must coincide
    target = tiny_pairs.save_checkpoint(folder / "target", **certain)
    draft = tiny_pairs.perturb(tiny_pairs.save_checkpoint(folder / "draft", **certain), 0.002)
    requests = [
        tiny_pairs.request(path, name=model.name)
        for path, model in ((target, pair.target), (draft, pair.draft))
    ]
    export_pair(*requests, folder / "long", tiny_pairs.settings(max_context=1024))
    return tiny_pairs.bound(folder / "long", folder / "made", min_tokens=2, max_tokens=5)


def test_demo_exports_answers_and_says_how_fast(smollm2_gguf: Path, tmp_path: Path) -> None:
    """End to end with the small model, which has no draft, and again with the bundle that is there now."""
    question = "What is the capital of France?"
    command = ("demo", "--recipe", "smollm2-135m", "--out", "made", "--question", question)
    first = run("semspec", *command, cwd=tmp_path)
    assert first.status == 0, first.err
    assert first.out.count("The capital of France is Paris.") == 2 and first.out.count("tokens/s") == 2
    assert "The two answers are identical, token for token." in first.out
    assert "1. fetching and exporting SmolLM2-135M-Instruct into made" in first.err and question in first.err
    assert "smollm2-135m has no draft model: there is nothing to calibrate" in first.err
    again = run("semspec", *command, "--max-tokens", 1, cwd=tmp_path)
    assert again.out.startswith("The\n[1 token, one step only]") and "not measured" in again.out
    assert "there already" in again.err and "tokens/s" not in again.out


def test_demo_calibrates_and_answers_by_meaning(named_pair: Path, tmp_path: Path) -> None:
    """Exactly twice, then lossily, with nothing of what training needs; the second time nothing is calibrated again.

    The manifest lists models by the alphabet, recipes the target first: the bundle must be known again.
    """
    bundle = tiny_pairs.bound(named_pair, tmp_path / "made")
    command = ("demo", "--out", "made", "--max-tokens", 24, "--question", "Hi")
    first = run("semspec", *command, cwd=tmp_path, without=NOT_NEEDED, OMP_NUM_THREADS="1")
    assert first.status == 0, first.err
    assert "The two answers are identical, token for token." in first.out
    assert "3. calibrating on 48 contexts of built-in problems" in first.err
    assert "collecting: 48 of 48" in first.err and "s left" in first.err and "quick calibration" in first.err
    assert "judges segments, see report.html" in first.err and "4. asking the same by meaning: " in first.err
    assert "This answer is lossy" in first.out and "judged segments kept whole" in first.out
    assert first.out.count("tokens/s") == 3 and "\x1b" not in first.out
    folder = latest_probes(Bundle.open(bundle))
    assert folder is not None and folder.name == "1" and (folder / "report.html").is_file()
    again = run("semspec", *command, cwd=tmp_path, without=(*NOT_NEEDED, "matplotlib"))
    assert again.status == 0 and "made is calibrated already: its probes are used as they are" in again.err
    assert "collecting" not in again.err and latest_probes(Bundle.open(bundle)) == folder

    def texts(out: str) -> list[str]:
        return [line for line in out.splitlines() if not line.startswith("[") and "Speed of" not in line]

    assert texts(again.out) == texts(first.out)


def test_demo_shows_no_semantic_answer_where_it_cannot(named_pair: Path, tmp_path: Path) -> None:
    """Asked not to, it stops behind the exact answers; with too little time for a calibration it says so and fails,
    and keeps what was collected."""
    bundle = tiny_pairs.bound(named_pair, tmp_path / "made")
    command = ("demo", "--out", "made", "--max-tokens", 2, "--question", "Hi")
    exact = run("semspec", *command, "--no-calibrate", cwd=tmp_path)
    assert exact.status == 0 and "3." not in exact.err and not (tmp_path / "made.calibration").exists()
    short = run("semspec", *command, "--minutes", 1e-6, cwd=tmp_path)
    assert short.status == 1 and "Traceback" not in short.err and "lossy" not in short.out
    assert "identical" in short.out and "no context with samples" in short.err.splitlines()[-1]
    tiny_probes.add_probes(bundle, models={"target": {"target/other": "0"}, "draft": {}})
    other = run("semspec", *command, cwd=tmp_path)
    assert other.status == 1 and "was made with another draft" in other.err.splitlines()[-1]


def test_demo_does_not_take_another_models_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    """It would show something else than it says."""
    done = run("semspec", "demo", "--recipe", "smollm2-135m", "--out", tiny_bundle, cwd=tmp_path)
    assert done.status == 2 and "holds checkpoint; give another --out" in done.err


@pytest.mark.parametrize("minutes", ["0", "-1", "soon"])
def test_no_time_at_all_is_a_usage_error(tmp_path: Path, minutes: str) -> None:
    """Said before gigabytes are fetched."""
    done = run("semspec", "demo", "--minutes", minutes, cwd=tmp_path)
    assert done.status == 2 and "--minutes" in done.err and not list(tmp_path.iterdir())


def test_a_missing_library_is_told_before_the_fetch(tmp_path: Path) -> None:
    """What the calibration's report needs is missed after minutes otherwise."""
    message = one_line(run("semspec", "demo", cwd=tmp_path, without=["matplotlib"]), 1)
    assert "pip install 'semspec[demo]', or add --no-calibrate" in message and not list(tmp_path.iterdir())
