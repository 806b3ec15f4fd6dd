"""Bundles on disk: what was written opens wherever it lies; what was changed, or was never ours, is one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from audit import files_opened
from tiny_pairs import request, save_checkpoint, settings

from semspec import LLM, SamplingParams
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import MANIFEST, Bundle, sha256_of, write_manifest
from semspec.runtime.errors import BundleError
from semspec.runtime.external import check_external_data

DATA, GRAPH = "target/onnx/weights.data", "target/onnx/cpu.onnx"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with target and draft; read only."""
    folder = tmp_path_factory.mktemp("pair")
    target = request(save_checkpoint(folder / "target", "llama"))
    draft = request(save_checkpoint(folder / "draft", "qwen2", num_hidden_layers=2), "int8")
    return export_pair(target, draft, folder / "bundle", settings(hidden_layers=(0, -1))).path


@pytest.fixture
def bundle(pair: Path, tmp_path: Path) -> Path:
    """A copy to break, under a name that a shell and an encoding would trip over (D35)."""
    folder = tmp_path / "päth 空 格" / "a b"
    return Path(shutil.copytree(pair, folder))


def refusal(path: Path, *, verify: bool = False) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path, verify=verify)
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 400 + 3 * len(str(path))
    return message


def manifest_of(bundle: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    return content


def write_manifest_of(bundle: Path, content: Any) -> None:
    (bundle / MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = manifest_of(bundle)
    change(content)
    write_manifest_of(bundle, content)


def answer(bundle: Path) -> tuple[int, ...]:
    with LLM(bundle, threads=1) as llm:
        return llm.generate("Hello", GREEDY).token_ids


def test_what_was_written_is_read_back(pair: Path) -> None:
    """The manifest is the same record and the same bytes again; every file is in it with its hash."""
    bundle = Bundle.open(pair, verify=True)
    assert bundle.manifest.to_json() == (pair / MANIFEST).read_text(encoding="utf-8")
    files = {path.relative_to(pair).as_posix() for path in pair.rglob("*") if path.is_file()}
    assert bundle.manifest.files.keys() == files - {MANIFEST}
    assert bundle.model("target").graphs["cpu"].hidden_layers == (0, 3)
    assert bundle.model("draft").precision["layers"] == "int8 block 32"


def test_a_name_that_is_not_utf8_is_kept(pair: Path, tmp_path: Path) -> None:
    """A file name of other bytes reaches Python as lone surrogates, which UTF-8 cannot write."""
    manifest = Bundle.open(pair).manifest
    target = dataclasses.replace(manifest.models["target"], name=os.fsdecode(b"caf\xe9"))
    write_manifest(tmp_path, dataclasses.replace(manifest, models={"target": target}))
    found = json.loads((tmp_path / MANIFEST).read_text(encoding="utf-8"))["models"]["target"]["name"]
    assert os.fsencode(found) == b"caf\xe9"


def test_a_bundle_works_from_anywhere_and_after_a_move(
    pair: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D35: paths inside are relative, nothing is looked for in the working directory, odd names are names."""
    expected = answer(pair)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert answer(bundle) == expected
    assert answer(Path("..") / bundle.relative_to(tmp_path)) == expected
    bundle.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to("moved")
    assert answer(tmp_path / "link") == expected


def test_a_graph_without_its_data_names_the_file(bundle: Path, tmp_path: Path) -> None:
    """D35: a .onnx that was moved alone, and a bundle whose data stayed behind."""
    alone = Path(shutil.copy(bundle / GRAPH, tmp_path))
    with pytest.raises(BundleError, match=r"needs 'weights.data' beside it, which is missing"):
        check_external_data(alone)
    size = (bundle / DATA).stat().st_size
    (bundle / DATA).unlink()
    assert f"{bundle / DATA} is missing: {size} bytes expected" in refusal(bundle)


def test_cut_data_names_expected_and_found_sizes(bundle: Path) -> None:
    """D35: half a download must not become half a model."""
    size = (bundle / DATA).stat().st_size
    os.truncate(bundle / DATA, size // 2)
    assert f"{bundle / DATA} has {size // 2} bytes, {size} expected" in refusal(bundle)


def test_swapped_data_of_equal_size_is_caught_by_its_hash(bundle: Path, tmp_path: Path) -> None:
    """D35: an engine loads it in silence and answers nonsense; the quick opening cannot see it, verify does."""
    other = export_pair(
        request(save_checkpoint(tmp_path / "other", "llama", 1)), None, tmp_path / "o", settings()
    )
    mine, theirs = sha256_of(bundle / DATA), sha256_of(other.path / DATA)
    shutil.copy(other.path / DATA, bundle / DATA)
    Bundle.open(bundle)
    message = refusal(bundle, verify=True)
    assert f"{bundle / DATA} was changed: sha256 {theirs}, expected '{mine}'" in message


@pytest.mark.parametrize(
    "name",
    ["../w", "a/../../w", "/etc/passwd", "..", ".", "", "..\\w", "C:\\w", "C:w", "a\nb", "a\x1b[31m", "a\0b"],
    ids=repr,
)
def test_a_manifest_cannot_name_files_outside(bundle: Path, name: str) -> None:
    """D51: refused by the name alone; nothing was read but the manifest."""
    edit(bundle, lambda content: content["files"].update({name: {"size": 4, "sha256": "0" * 64}}))
    (bundle.parent / "w").write_bytes(b"look")
    with files_opened() as opened:
        assert "which leads out of the bundle; refuse this bundle" in refusal(bundle, verify=True)
    assert {path.resolve() for path in opened} <= {bundle / MANIFEST, *listed(bundle)}


@pytest.mark.parametrize("name", ["w" * 5000, "a/" * 3000 + "w", "\ud800"], ids=["long", "deep", "surrogate"])
def test_names_that_no_file_can_have(bundle: Path, name: str) -> None:
    """The system's own complaint becomes one line of ours."""
    edit(bundle, lambda content: content["files"].update({name: {"size": 4, "sha256": "0" * 64}}))
    refusal(bundle)


def listed(bundle: Path) -> set[Path]:
    return {path.resolve() for path in bundle.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.mark.parametrize("name", [DATA, GRAPH, "tokenizer/tokenizer.json", MANIFEST, "target", "tokenizer"])
def test_links_that_lead_out_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    """D51: a file, the manifest itself or a whole folder; with equal content, so nothing but the link is wrong."""
    secret = tmp_path / "secret"
    shutil.move(bundle / name, secret)
    (bundle / name).symlink_to(secret)
    with files_opened() as opened:
        assert "is a link that leads out of the bundle" in refusal(bundle, verify=True)
    assert not [path for path in opened if path.resolve().is_relative_to(secret)]


@pytest.mark.parametrize("name", [DATA, GRAPH, "tokenizer/tokenizer.json", MANIFEST])
@pytest.mark.parametrize("kind", ["fifo", "folder", "loop"])
def test_what_is_no_file_is_not_opened(bundle: Path, name: str, kind: str) -> None:
    """D51: opening a pipe would wait for ever."""
    (bundle / name).unlink()
    make = {"fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda path: Path(path).symlink_to(path)}
    make[kind](bundle / name)
    with files_opened() as opened:
        message = refusal(bundle)
    assert Path(name).name in message and bundle / name not in opened


def test_links_and_hard_links_inside_are_files(bundle: Path) -> None:
    """A hard link cannot lead anywhere; a link to another file of the bundle is followed for a tokenizer."""
    os.link(bundle / DATA, bundle / "again")
    (bundle / "tokenizer" / "tokenizer.json").rename(bundle / "moved.json")
    (bundle / "tokenizer" / "tokenizer.json").symlink_to("../moved.json")
    Bundle.open(bundle, verify=True)


def test_weights_that_the_manifest_does_not_list(bundle: Path) -> None:
    """A file that is read but has no hash would make verify=True a false promise."""
    edit(bundle, lambda content: content["files"].pop(DATA))
    assert f"does not list '{DATA}'" in refusal(bundle)


def test_a_chat_template_that_was_put_there(bundle: Path) -> None:
    """A template is a program: it is the exported one or none."""
    edit(bundle, lambda content: content["files"].pop("tokenizer/chat_template.jinja"))
    assert "does not list 'tokenizer/chat_template.jinja'" in refusal(bundle)


def test_other_files_in_the_folder_do_no_harm(bundle: Path) -> None:
    """A note beside a bundle is nobody's business."""
    (bundle / "NOTES.txt").write_text("mine")
    Bundle.open(bundle, verify=True)


@pytest.mark.parametrize("number", [0, 2, -1, 1.0, "1", True, None, [1], "9" * 300], ids=repr)
def test_another_format_is_named(bundle: Path, number: object) -> None:
    """A bundle of a later semspec says so, whatever else is in it."""
    write_manifest_of(bundle, {"format": number, "everything": "else"})
    assert "this semspec reads format 1: export the bundle again" in refusal(bundle)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_manifest_that_is_not_json(bundle: Path, raw: bytes) -> None:
    """Cut, emptied, deep or in another encoding."""
    (bundle / MANIFEST).write_bytes(raw)
    assert MANIFEST in refusal(bundle)


def test_a_huge_manifest_is_not_read(bundle: Path) -> None:
    """Its size says that it is not ours."""
    os.truncate(bundle / MANIFEST, 1 << 40)
    with files_opened() as opened:
        assert "is larger than 16777216 bytes" in refusal(bundle)
    assert not opened


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value below one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(content: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value at the end of `path`; ... removes it."""
    result = copy.deepcopy(content)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return result


def is_free(path: tuple[str | int, ...]) -> bool:
    """Values that are there for people only: figures of the gate, what became of weights, and the origin."""
    return path[0] == "origin" or (path[0] == "models" and path[2:3] in {("quality",), ("weights",)})


OTHERS: dict[str, Any] = {
    "removed": ...,
    "text": "other",
    "null": None,
    "true": True,
    "negative": -1,
    "fraction": 1.5,
    "huge": 10**30,
    "list": ["x"],
    "object": {"x": 1},
}
TEXTS = {"name", "from", "sha256", "licence", "layers", "head", "embedding", "quantizer"}


def test_every_field_that_is_missing_or_of_another_type_is_one_line(bundle: Path) -> None:
    """Each value of a real manifest in turn: removed, and replaced by everything that JSON knows. Accepted are
    another text where a text is, a larger cap, and nothing where there is a default or only people read."""
    content = manifest_of(bundle)
    content["models"]["target"]["quality"] = {"kl": 0.5}
    accepted: dict[str, set[str | int]] = {kind: set() for kind in OTHERS}
    for path in places(content):
        for kind, value in OTHERS.items():
            write_manifest_of(bundle, changed(content, path, value))
            try:
                Bundle.open(bundle)
            except BundleError as error:
                assert "\n" not in str(error) and str(bundle) in str(error)
            else:
                if not is_free(path):
                    accepted[kind].add(path[-1])
    removed = accepted.pop("removed")
    assert {kind: keys for kind, keys in accepted.items() if keys} == {"text": TEXTS, "huge": {"max_tokens"}}
    defaults = {"hidden_layers", "activation", "cache", "kind", "min_tokens", "max_tokens"}
    listed_only = {f"{role}/{name}" for role in ("target", "draft") for name in ("LICENSE", "config.json")}
    entries = TEXTS - {"name"}  # of `source` and `precision`, which are open lists
    assert removed - {0, 1} == defaults | listed_only | entries | {"draft"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("extra",), 1, "manifest has the unknown key 'extra'"),
        (("models", "target", "extra"), 1, "manifest.models.target has the unknown key 'extra'"),
        (("models", "judge"), {}, "manifest.models.judge lacks 'name'"),
        (("models", "target", "name"), 5, "manifest.models.target.name must be text, found 5"),
        (
            ("models", "target", "graphs", "cpu", "n_layers"),
            "3",
            "n_layers must be a whole number, found '3'",
        ),
        (("models", "target", "graphs", "cpu", "n_layers"), 10**9, "n_layers must be between 1 and 4096"),
        (
            ("models", "target", "graphs", "cpu", "pooled_layers"),
            "23",
            "pooled_layers must be a list, found '23'",
        ),
        (
            ("models", "target", "graphs", "cpu", "pooled_layers"),
            [3, 2],
            "must be ascending state indices in 0..3",
        ),
        (("models", "target", "graphs", "cpu", "cache"), "float8", "cache must be one of float32, float16"),
        (("models", "target", "graphs", "cpu", "graph"), "cuda", "graph 'cpu' says that it is 'cuda'"),
        (("models", "target", "graphs", "gpu"), {}, "manifest.models.target.graphs.gpu lacks 'graph'"),
        (("models", "target", "graphs", "cpu", "width"), True, "width must be a whole number, found True"),
        (("boundary", "kind"), "comma", "boundary kind must be one of blank-line, newline"),
        (("boundary", "min_tokens"), 100, "min_tokens must be between 1 and max_tokens"),
        (("files", DATA), ..., f"does not list '{DATA}'"),
        (("files", GRAPH), ..., f"files must list {GRAPH}"),
        (("files", "tokenizer/tokenizer.json"), ..., "files must list tokenizer/tokenizer.json"),
        (("files", GRAPH, "size"), "big", f"manifest.files.{GRAPH}.size must be a whole number"),
        (("origin",), [], "manifest.origin must be an object, found []"),
    ],
    ids=str,
)
def test_a_damaged_manifest_names_the_place_and_the_value(
    bundle: Path, path: tuple[str, ...], value: object, message: str
) -> None:
    """Where it is, what is there and what may be there."""
    write_manifest_of(bundle, changed(manifest_of(bundle), path, value))
    assert message in refusal(bundle)


def test_a_folder_that_is_no_bundle_names_the_command(tmp_path: Path) -> None:
    """The most likely first mistake."""
    for path in (tmp_path, tmp_path / "gone"):
        assert refusal(path) == (
            f"{path} is not a bundle: it has no {MANIFEST}; make one with semspec-export --out {path}"
        )


def test_models_and_graphs_that_are_not_there(pair: Path, tmp_path: Path) -> None:
    """Asked for by a command line: the message says what there is and how to get the rest."""
    with pytest.raises(
        BundleError, match=r"no 'cuda' graph of its target; it has cpu: export again with --graphs"
    ):
        Bundle.open(pair).graph_file("target", "cuda")
    alone = Path(shutil.copytree(pair, tmp_path / "alone"))
    edit(alone, lambda content: content["models"].pop("draft"))
    with pytest.raises(BundleError, match="has no draft; it has target"):
        Bundle.open(alone).model("draft")
