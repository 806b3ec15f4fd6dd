"""`semspec generate` and `semspec inspect`, and what all commands share: help, statuses, one-line errors."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from commands import finish, one_line, run, start
from tiny_probes import add_probes

from semspec import LLM, SamplingParams, __version__
from semspec.cli import COMMANDS
from semspec.runtime.bundle import MANIFEST
from semspec.runtime.probes import PREDICTOR_FILE

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

# All commands


@pytest.mark.parametrize("command", ["semspec", "semspec-export", *(f"semspec {name}" for name in COMMANDS)])
def test_help_is_shown_on_stdout(command: str, tmp_path: Path) -> None:
    """Every command explains itself, with status 0, even where no engine or exporter is installed."""
    program, *name = command.split()
    done = run(
        program, *name, "--help", cwd=tmp_path, without=("onnx", "onnxruntime", "huggingface_hub", "gguf")
    )
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"Usage: {command} ")


def test_list_of_commands_is_the_help_of_the_group(tmp_path: Path) -> None:
    """With a line for each; without a command it is shown too, as a mistake."""
    shown = run("semspec", "--help", cwd=tmp_path).out
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    bare = run("semspec", cwd=tmp_path)
    assert (bare.status, bare.out, bare.err) == (2, "", shown)


def test_version_is_shown(tmp_path: Path) -> None:
    """The first thing that a bug report asks for."""
    assert run("semspec", "--version", cwd=tmp_path).out == f"semspec, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode"], "No such command 'decode'"),
        (["generate"], "Missing argument 'BUNDLE'"),
        (["generate", "bundle"], "Missing argument 'PROMPT'"),
        (["generate", "bundle", "hi", "--colour"], "No such option"),
        (["generate", "bundle", "hi", "--top-k", "many"], "'many' is not a valid integer"),
        (["generate", "bundle", "hi", "--threads", "0"], "0 is not in the range x>=1"),
        (["inspect", "bundle", "other"], "unexpected extra argument"),
    ],
    ids=str,
)
def test_wrong_usage_has_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    """And names what was wrong and where help is."""
    done = run("semspec", *arguments, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert message in done.err and "--help" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("command", [("generate", "nowhere", "hi"), ("inspect", "nowhere")], ids=" ".join)
def test_folder_that_is_no_bundle_has_status_1(command: tuple[str, ...], tmp_path: Path) -> None:
    """In one line that says how a bundle is made."""
    (tmp_path / "empty").mkdir()
    message = one_line(run("semspec", *command, cwd=tmp_path), 1)
    assert (
        message.startswith("semspec: nowhere is not a bundle") and "semspec-export --out nowhere" in message
    )
    replaced = ["empty" if part == "nowhere" else part for part in command]
    assert "empty is not a bundle" in one_line(run("semspec", *replaced, cwd=tmp_path), 1)


def test_bug_keeps_its_traceback(tiny_bundle: Path, tmp_path: Path) -> None:
    """Only errors of ours become one line: anything else must be seen whole to be mended."""
    done = run("semspec", "generate", tiny_bundle, "hi", cwd=tmp_path, without=("numpy",))
    assert done.status == 1
    assert "Traceback" in done.err and "numpy" in done.err


# generate


def test_answer_alone_is_on_stdout(smollm2_bundle: Path, tmp_path: Path) -> None:
    """It can be piped into another program; the chat template is applied, and the folder stays as it was."""
    done = run("semspec", "generate", smollm2_bundle, QUESTION, cwd=tmp_path)
    assert done == (0, f"{ANSWER}\n", "")
    assert not list(tmp_path.iterdir())


def test_prompt_from_standard_input(smollm2_bundle: Path, tmp_path: Path) -> None:
    """`echo question | semspec generate bundle -` asks the same question: the newline is echo's, not theirs."""
    for ending in ("", "\n", "\r\n"):
        done = run("semspec", "generate", smollm2_bundle, "-", cwd=tmp_path, stdin=QUESTION + ending)
        assert done == (0, f"{ANSWER}\n", "")


def test_system_message_enters_the_chat(smollm2_bundle: Path, tmp_path: Path) -> None:
    """Counted: the default system message of this model is longer."""
    done = run(
        "semspec", "generate", smollm2_bundle, QUESTION, "--system", "Be brief.", "--json", cwd=tmp_path
    )
    with LLM(smollm2_bundle, threads=1) as llm:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        ids = llm.tokenizer.encode_chat(messages)
    assert json.loads(done.out)["stats"]["prompt_tokens"] == len(ids)


def test_json_is_one_line_and_the_last(tiny_bundle: Path, tmp_path: Path) -> None:
    """A program reads the last line; text of any kind, characters beyond ASCII too, is escaped in it."""
    options = ("--max-tokens", 30, "--temperature", 5, "--seed", 1, "--json")
    done = run("semspec", "generate", tiny_bundle, "héllo", *options, cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert done.out.count("\n") == 1 and done.out.isascii()
    answer = json.loads(done.out)
    assert answer.keys() == {"text", "token_ids", "finish_reason", "stats"}
    with LLM(tiny_bundle, threads=1) as llm:
        params = SamplingParams(max_tokens=30, temperature=5, top_p=0.9, seed=1)
        expected = llm.chat([{"role": "user", "content": "héllo"}], params)
    assert (answer["text"], tuple(answer["token_ids"])) == (expected.text, expected.token_ids)
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["stats"]["generated_tokens"] == len(expected.token_ids)


def test_raw_continues_the_text_itself(tiny_bundle: Path, tmp_path: Path) -> None:
    """Five bytes are five tokens of prompt: no template was put around them."""
    options = ("--raw", "--max-tokens", 4, "--temperature", 0, "--json")
    answer = json.loads(run("semspec", "generate", tiny_bundle, "hello", *options, cwd=tmp_path).out)
    assert answer["stats"]["prompt_tokens"] == 5
    with LLM(tiny_bundle, threads=1) as llm:
        expected = llm.generate("hello", SamplingParams(max_tokens=4))
    assert tuple(answer["token_ids"]) == expected.token_ids


def test_stats_are_on_stderr(tiny_bundle: Path, tmp_path: Path) -> None:
    """Beside the answer, not in it."""
    options = ("--max-tokens", 3, "--seed", 1)
    plain = run("semspec", "generate", tiny_bundle, "hi", *options, cwd=tmp_path)
    done = run("semspec", "generate", tiny_bundle, "hi", *options, "--stats", cwd=tmp_path)
    assert done.out == plain.out and plain.err == ""
    assert "generated_tokens: 3\n" in done.err and "tokens_per_second: " in done.err


def test_characters_that_stdout_cannot_hold_are_written_as_escapes(
    smollm2_bundle: Path, tmp_path: Path
) -> None:
    """A terminal of another time must not end an answer halfway."""
    options = ("--raw", "--max-tokens", 8)
    done = run(
        "semspec",
        "generate",
        smollm2_bundle,
        5 * "👩‍🚀",
        *options,
        cwd=tmp_path,
        PYTHONIOENCODING="latin-1",
    )
    assert done == (0, "\\U0001f469\\u200d\\U0001f680\n", "")


def test_reader_that_leaves_is_no_error_worth_a_traceback(tiny_bundle: Path, tmp_path: Path) -> None:
    """`semspec generate ... | head -c 1`."""
    with start(
        "semspec", "generate", tiny_bundle, "hi", "--raw", "--max-tokens", 100, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert finish(process) == (1, "", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "max_tokens must be a whole number of at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["--top-p", "1.5"], "top_p must be finite and between 0 and 1, got 1.5"),
        (["--backend", "gpu"], "backend must be one of auto, cpu, cuda, tensorrt, tensorrt-rtx, got 'gpu'"),
        (["--raw", "--system", "x"], "--system belongs to a chat"),
    ],
    ids=str,
)
def test_wrong_setting_has_status_2(
    options: list[str], message: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    """One line: what, which value, what is allowed."""
    assert message in one_line(run("semspec", "generate", tiny_bundle, "hi", *options, cwd=tmp_path), 2)


def test_prompt_that_does_not_fit_has_status_2(tiny_bundle: Path, tmp_path: Path) -> None:
    """With both numbers."""
    done = run("semspec", "generate", tiny_bundle, "-", "--raw", cwd=tmp_path, stdin="x" * 200)
    assert "200 tokens" in (message := one_line(done, 2)) and "128" in message


def test_input_that_is_no_text_has_status_2(tiny_bundle: Path, tmp_path: Path) -> None:
    """A binary file by mistake: named for what it is, whatever the locale makes of its bytes."""
    for locale in ("C", "C.UTF-8"):
        done = run("semspec", "generate", tiny_bundle, "-", cwd=tmp_path, stdin=b"a\xff", LC_ALL=locale)
        assert "standard input is not UTF-8 text" in one_line(done, 2)


def test_backend_that_is_missing_has_status_1(tiny_bundle: Path, tmp_path: Path) -> None:
    """D46: the graph for it is missing first of all; the CPU is not taken instead."""
    done = run("semspec", "generate", tiny_bundle, "hi", "--backend", "cuda", cwd=tmp_path)
    assert "has no 'cuda' graph" in one_line(done, 1)


def test_missing_engine_gives_the_command_that_installs_it(tiny_bundle: Path, tmp_path: Path) -> None:
    """The base package has no engine: extras choose it."""
    done = run("semspec", "generate", tiny_bundle, "hi", cwd=tmp_path, without=("onnxruntime",))
    assert "pip install 'semspec[cpu]'" in one_line(done, 1)


def test_model_without_chat_template_says_how_to_go_on(tiny_bundle: Path, tmp_path: Path) -> None:
    """Base models have none; plain text works with them."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    template = "tokenizer/chat_template.jinja"
    (copy / template).unlink()
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    del manifest["files"][template]
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    assert "--raw" in one_line(run("semspec", "generate", "copy", "hi", cwd=tmp_path), 2)
    done = run("semspec", "generate", "copy", "hi", "--raw", "--max-tokens", 1, cwd=tmp_path)
    assert done.status == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_answer_ends_at_once(
    number: signal.Signals, status: int, smollm2_bundle: Path, tmp_path: Path
) -> None:
    """What was written stays, the status is the shell's for that signal, and there is no traceback."""
    prompt = "1 2 3 4 5 6 7 8 9 10"  # it would count for minutes
    with start(
        "semspec", "generate", smollm2_bundle, prompt, "--raw", "--max-tokens", 8000, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(20)
        process.send_signal(number)
        done = finish(process)
    assert done.status == status
    assert len(done.out) < 8000
    assert done.err.strip() == ("semspec: interrupted" if number == signal.SIGINT else "")


# inspect


def test_inspect_shows_precision_and_quality(smollm2_bundle: Path, tmp_path: Path) -> None:
    """What was measured at export, and what to do for better, without another run."""
    done = run("semspec", "inspect", smollm2_bundle, cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in done.out.splitlines() if line.startswith("  "))
    assert rows["layers"] == "int4 block 32"
    assert rows["head"] == rows["embedding"] == "int8 block 32"
    assert rows["licence"].lower() == "apache-2.0"
    assert "mean KL" in rows["quality"] and "better: --precision int8" in rows["quality"]
    assert "hashes not" in done.out
    assert re.search(
        r"down +5\.1\d bits, +\d+\.\d MiB, error 0\.[01]\d+ of its weights: 30 x int4 block 32\n", done.out
    )
    assert re.search(r"head +9\.00 bits, .*: 1 x int8 block 32\n", done.out)
    assert re.search(r"all +[56]\.\d\d bits", done.out) and re.search(r"perplexity \d+\.\d\d \(", done.out)


def test_inspect_json_is_the_manifest(smollm2_bundle: Path, tmp_path: Path) -> None:
    """One line, the whole of it."""
    done = run("semspec", "inspect", smollm2_bundle, "--json", cwd=tmp_path)
    assert done.out.count("\n") == 1
    assert json.loads(done.out) == json.loads((smollm2_bundle / MANIFEST).read_text(encoding="utf-8"))


def test_inspect_of_a_bundle_without_gate_says_so(tiny_bundle: Path, tmp_path: Path) -> None:
    """Not measured is not the same as good."""
    shown = run("semspec", "inspect", tiny_bundle, "--verify", cwd=tmp_path).out
    assert "not measured" in shown and "hashes checked" in shown
    assert "states 0, 3" in shown


def test_inspect_finds_a_changed_file_on_request(tiny_bundle: Path, tmp_path: Path) -> None:
    """The licence is not read by anything else, so only this would notice."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    (copy / "target" / "LICENSE").write_text("Apache-2.1\n", encoding="utf-8")
    assert run("semspec", "inspect", "copy", cwd=tmp_path).status == 0
    assert "LICENSE was changed" in one_line(run("semspec", "inspect", "copy", "--verify", cwd=tmp_path), 1)


@pytest.mark.parametrize(
    "quality", [{"grade": "good"}, {"grade": "good", "kl": "x", "top1": 1, "cosine": 1, "tokens": 1}]
)
def test_inspect_of_damaged_figures_is_one_line(
    quality: dict[str, object], tiny_bundle: Path, tmp_path: Path
) -> None:
    """A manifest is a stranger's; its figures are free in form."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    manifest["models"]["target"]["quality"] = quality
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    done = run("semspec", "inspect", "copy", cwd=tmp_path)
    assert done.status == 1
    assert done.err.startswith("semspec: the quality figures") and done.err.count("\n") == 1


@pytest.fixture
def pair_copy(tiny_pair: Path, tmp_path: Path) -> Path:
    """One that probes can be put into."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "bundle"))


def test_inspect_shows_the_probes(pair_copy: Path, tmp_path: Path) -> None:
    """What decides, on what it was made, and what each risk costs; as JSON the whole set."""
    assert (
        "probes: none (semspec calibrate makes them)" in run("semspec", "inspect", "bundle", cwd=tmp_path).out
    )
    add_probes(pair_copy, layers=(3,), number=2)
    out = run("semspec", "inspect", "bundle", cwd=tmp_path).out
    assert "probes: probes/2, made on backend cpu, of samples at temperature 0.6, top-p 0.95" in out
    assert "reads states 3 of the target; target.mean_logprob, text.capped" in out
    assert "0.05: score from 0.8000, keeps 30% of drafted tokens, observed 0.010, bound 0.040" in out
    assert "would accept 0.90 where the models agree on 0.70" in out
    assert "risks        of segments that mean what no sample of the target means" in out
    found = json.loads(run("semspec", "inspect", "bundle", "--json", cwd=tmp_path).out)["probes"]
    assert found.pop("folder") == "2"
    assert found == json.loads((pair_copy / "probes" / "2" / PREDICTOR_FILE).read_text(encoding="utf-8"))
    add_probes(pair_copy, number=3, risk_of="answer")
    out = run("semspec", "inspect", "bundle", cwd=tmp_path).out
    assert "risks        of segments that spoil the answer" in out


def test_inspect_of_probes_that_do_not_fit_says_so(pair_copy: Path, tmp_path: Path) -> None:
    """The models are shown all the same; damage is an error."""
    folder = add_probes(pair_copy)
    content = json.loads((folder / PREDICTOR_FILE).read_text(encoding="utf-8"))
    content["models"]["draft"]["draft/x"] = "0"
    (folder / PREDICTOR_FILE).write_text(json.dumps(content), encoding="utf-8")
    done = run("semspec", "inspect", "bundle", cwd=tmp_path)
    assert done.status == 0 and "probes: not usable with this bundle:" in done.out and "target:" in done.out
    (folder / PREDICTOR_FILE).unlink()
    assert "has no predictor.json" in one_line(run("semspec", "inspect", "bundle", "--json", cwd=tmp_path), 1)
