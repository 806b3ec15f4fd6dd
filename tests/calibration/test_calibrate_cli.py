"""`semspec calibrate BUNDLE` and `semspec calibrate join` as a user runs them; --ranges is test_calibrate.py's."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import commands
import pytest
import tiny_pairs
from click.testing import CliRunner

from semspec.calibration.cli import calibrate

QUICK = (
    "--equivalence", "exact", "--samples", "3,2", "--temperature", 0.3, "--probes", "linear", "--threads", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "contexts.jsonl"
    rows = [{"id": f"q{n}", "question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_bundle_is_calibrated_and_told(short_pair: Path, questions: Path, tmp_path: Path) -> None:
    """Tables on stdout, progress and places on stderr; again, with --json, one line and nothing done. Interrupted by
    Ctrl-C before, it has left nothing in the bundle, and goes on."""
    shutil.copytree(short_pair, tmp_path / "bundle")
    given = ("calibrate", "bundle", "--contexts", questions, *QUICK)
    with commands.start("semspec", *given, cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"collecting:") and int(line.split()[1]) > 5:
                process.send_signal(signal.SIGINT)
                break
        stopped = commands.finish(process)
    assert "stopping: what is being worked on is finished first" in stopped.err
    assert stopped.status == 130 and tiny_pairs.tree(tmp_path / "bundle") == tiny_pairs.tree(short_pair)
    kept = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "bundle.calibration/samples").glob("*.safetensors")
    }
    done = commands.run("semspec", *given, cwd=tmp_path)
    assert done.status == 0 and "Traceback" not in done.err, done
    assert kept and all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert (
        "collecting: 30 of 30" in done.err and "s left" in done.err and "bundle/probes/1 is ready" in done.err
    )
    assert "Shipped: " in done.out and "signals+text" in done.out and "target.mean_logprob" in done.out
    again = commands.run("semspec", *given, "--json", cwd=tmp_path)
    line = json.loads(again.out)
    assert again.status == 0 and line["probes"] == "bundle/probes/1" and line["new"] is False
    assert line["missing"] == 0 and line["candidates"].keys() >= {"signals", "signals+text", "ratio"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "bundle.calibration"]


def test_shards_are_collected_apart_and_joined(short_pair: Path, questions: Path, tmp_path: Path) -> None:
    """Each with a work folder of its own; the joined one needs no engine but the bundle's."""
    shutil.copytree(short_pair, tmp_path / "bundle")
    given = ("calibrate", "bundle", "--contexts", questions, "--questions", 6, *QUICK)
    for shard in ("1/2", "2/2"):
        work = ("--work", shard[0], "--shard", shard)
        done = commands.run("semspec", *given, *work, "--json", cwd=tmp_path, without=["torch", "matplotlib"])
        assert done.status == 0, done
        line = json.loads(done.out)
        assert line["shard"] == [int(shard[0]), 2] and line["missing"] == 0 and line["contexts"] == 9
    joined = commands.run("semspec", "calibrate", "join", "1", "2", "--out", "w", cwd=tmp_path)
    assert joined.status == 0 and "all shards: 18 of 18 contexts" in joined.err and not joined.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "bundle", "w"]
    assert tiny_pairs.tree(tmp_path / "bundle") == tiny_pairs.tree(short_pair)
    message = commands.one_line(
        commands.run("semspec", "calibrate", "join", "1", "--out", "x", cwd=tmp_path), 2
    )
    assert "all 2 shards of a run are joined" in message


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--contexts", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["--contexts", "empty"], 1, "empty holds no problems"),
        (["--contexts", "broken"], 1, "broken, line 2: not JSON"),
        (["--questions", "9"], 1, "9 questions are too few"),
        (["--questions", "999"], 1, "holds 10 problems, 999 were asked for"),
        (["--samples", "1,4"], 2, "n_draft must be at least 2, got 1"),
        (["--per-question", "4"], 2, "n_contexts must be 1 to 3, got 4"),
        (["--boundary", "newline"], 2, "could not use probes for newline:12-64"),
        (["--boundary", "line"], 2, "a boundary is written"),
        (["--equivalence", "embed"], 2, "give its hub id or folder as --encoder"),
        (["--label", "best"], 2, "label must be one of own"),
        (["--probes", "huge"], 2, "a probe must be one of"),
        (["--shard", "3/2"], 2, "shard must be i/n with i in 1..n"),
        (["--budget", "0"], 2, "budget must be more than 0 minutes"),
        (["--backend", "tpu"], 2, "backend"),
        (["--out", "empty"], 2, "empty exists; give --out a new folder"),
    ],
)
def test_a_fault_is_one_line(
    short_pair: Path, questions: Path, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    """Before anything is collected, and nothing is written."""
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "broken").write_text('{"id": "a", "question": "1+1?"}\n{"id": "b", "quest')
    given = ["calibrate", short_pair, "--contexts", questions, *QUICK, "--work", "w", *arguments]
    assert message in commands.one_line(commands.run("semspec", *given, cwd=tmp_path), status)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty"]


@pytest.mark.parametrize("samples", ["8", "8,", "8,4,2", "eight,4", "²,4"])
def test_samples_that_are_no_pair_are_refused(samples: str) -> None:
    """A usage error, with what is expected."""
    done = CliRunner().invoke(calibrate, ["x", "--samples", samples])
    assert done.exit_code == 2 and "expected DRAFT,TARGET as in 8,4" in done.output


@pytest.mark.parametrize(("library", "probes"), [("torch", "linear,mlp2"), ("matplotlib", "linear")])
def test_a_missing_extra_names_its_pip_command(
    short_pair: Path, questions: Path, tmp_path: Path, library: str, probes: str
) -> None:
    """Before hours of collecting. Linear probes alone need no torch (the demo's test)."""
    given = ["calibrate", short_pair, "--contexts", questions, *QUICK, "--work", "w", "--probes", probes]
    line = commands.one_line(commands.run("semspec", *given, cwd=tmp_path, without=[library]), 1)
    assert "pip install 'semspec[calibrate]'" in line and not list(tmp_path.iterdir())


def test_a_bundle_without_a_draft_is_refused(tiny_bundle: Path, questions: Path, tmp_path: Path) -> None:
    """Segments are judged only where a draft writes them."""
    given = ["calibrate", tiny_bundle, "--contexts", questions, *QUICK, "--work", "w"]
    assert "has no draft model" in commands.one_line(commands.run("semspec", *given, cwd=tmp_path), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["run", "--help"], ["join", "--help"], ["ranges", "--help"], ["check", "--help"]],
)
def test_help_is_there(tmp_path: Path, arguments: list[str]) -> None:
    """`calibrate` alone is a question too."""
    done = commands.run("semspec", "calibrate", *arguments, cwd=tmp_path)
    assert "Usage: semspec calibrate" in done.out + done.err and done.status == (0 if arguments else 2)


def test_without_questions_it_takes_the_built_in_problems(tmp_path: Path) -> None:
    """Nobody needs data of their own; they are collected like any others, here a third of six."""
    from semspec.calibration.collection import open_collection
    from semspec.calibration.problems import generate_problems
    from semspec.export.pipeline import export_pair

    requests = [
        tiny_pairs.request(
            tiny_pairs.save_checkpoint(tmp_path / name, seed=seed, max_position_embeddings=512)
        )
        for seed, name in enumerate(("target", "draft"))
    ]
    made = export_pair(*requests, tmp_path / "long", tiny_pairs.settings(max_context=512)).path
    bundle = tiny_pairs.bound(made, tmp_path / "bundle", min_tokens=2, max_tokens=6)
    given = [str(bundle), "--questions", "6", "--shard", "2/3", "--threads", "1", "--seed", "4"]
    done = CliRunner().invoke(calibrate, [*given, "--work", str(tmp_path / "work"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["missing"] == 0
    found = open_collection(tmp_path / "work" / "samples")
    problems = generate_problems(6, 4)
    assert found.run.questions == tuple(problem.id for problem in problems)
    contexts = [context for context, _ in found.contexts()]
    assert {context.question for context in contexts} == {problems[1].id, problems[4].id}
    assert {context.answer for context in contexts} == {problems[1].answer, problems[4].answer}
