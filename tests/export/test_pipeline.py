"""An export from checkpoint to bundle: the same bytes every time, and a manifest that tells what was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny_tokenizers
from graphs import export_graph
from tiny_pairs import ROWS, refused_export, request, save_checkpoint, save_gguf_checkpoint, settings, tree
from tokenizers import Tokenizer as Backend

from semspec.export.checkpoint import expected_tensors, open_checkpoint
from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.plan import ExportSettings
from semspec.export.writer import ALIGNMENT
from semspec.runtime.bundle import MANIFEST, Bundle, sha256_of
from semspec.runtime.errors import BundleError, ConfigError, PairError, SourceError
from semspec.runtime.segments import Boundary
from semspec.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A llama in three shards, a tied qwen2 as GGUF; read only."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "target": save_checkpoint(folder / "target", "llama", shard="60KB"),
        "draft": save_gguf_checkpoint(folder / "draft.gguf", "qwen2", 1, tie_word_embeddings=True),
    }


# what is made


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_exporting_twice_gives_the_same_bytes(
    sources: dict[str, Path], tmp_path: Path, precision: str
) -> None:
    """D33: into two folders and over one of them; every file, the manifest included, and no byte more."""
    target, draft = (request(sources[role], precision) for role in ("target", "draft"))
    one = tree(export_pair(target, draft, tmp_path / "one", settings()).path)
    two = tree(export_pair(target, draft, tmp_path / "other name", settings()).path)
    assert one == two
    over = export_pair(target, draft, tmp_path / "one", settings(), force=True).path
    assert tree(over) == one
    smaller = export_pair(target, None, tmp_path / "one", settings(), force=True).path
    assert {name.split("/")[0] for name in tree(smaller)} == {"target", "tokenizer", MANIFEST}


def test_the_data_file_holds_what_the_graph_refers_to(sources: dict[str, Path], tmp_path: Path) -> None:
    """D33: no bytes of a former export, none that nobody reads but padding to pages; both graphs share one file."""
    out = export_pair(
        request(sources["target"], "int8"), None, tmp_path / "out", settings(graphs=("cpu", "cuda"))
    ).path
    data = out / "target" / "onnx" / "weights.data"
    spans = set()
    for graph in ("cpu", "cuda"):
        for tensor in onnx.load(
            out / f"target/onnx/{graph}.onnx", load_external_data=False
        ).graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if entries:
                assert entries["location"] == data.name
                spans.add((int(entries["offset"]), int(entries["length"])))
    end = 0
    for offset, length in sorted(spans):
        assert offset - end < ALIGNMENT and offset % ALIGNMENT == 0
        end = offset + length
    assert end == data.stat().st_size


def test_the_manifest_tells_what_the_bundle_is(sources: dict[str, Path], tmp_path: Path) -> None:
    """Where the weights came from, what was done to them, where segments end, and which versions did it."""
    target = request(sources["target"], "int4", name="big", head="int8", block_size=64)
    draft = request(sources["draft"], "int8", name="small")
    boundary = Boundary(kind="blank-line", min_tokens=3, max_tokens=40)
    out = export_pair(
        target, draft, tmp_path / "out", settings(boundary=boundary, hidden_layers=(-1, 0))
    ).path
    manifest = Bundle.open(out, verify=True).manifest
    big, small = manifest.models["target"], manifest.models["draft"]
    assert (big.name, small.name) == ("big", "small")
    assert big.source == {
        "from": "target",
        "sha256": open_checkpoint(sources["target"]).sha256(),
        "licence": "apache-2.0",
    }
    assert small.source["sha256"] == sha256_of(sources["draft"])
    assert big.precision == {
        "layers": "int4 block 64",
        "head": "int8 block 32",
        "embedding": "int8 block 32",
        "quantizer": "mse",
    }
    assert big.graphs["cpu"].hidden_layers == (0, 3) and big.graphs["cpu"].pooled_layers == (2, 3)
    assert big.graphs["cpu"].max_context == 128 and big.graphs.keys() == {"cpu"}
    assert big.quality == {}
    assert manifest.boundary == boundary
    assert manifest.origin["sources"] == {"target": "target", "draft": "draft.gguf"}
    assert {"semspec", "onnx", "numpy", "tokenizers"} == manifest.origin["versions"].keys()
    config = json.loads((out / "target" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is False
    assert (out / "target" / "LICENSE").read_text() == "Apache-2.0\n"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_tokenizer_comes_along(sources: dict[str, Path], tmp_path: Path, role: str) -> None:
    """D20, D21, D26: vocabulary, chat template, end tokens, sampling defaults, from a folder and from GGUF."""
    out = export_pair(request(sources[role]), None, tmp_path / "out", settings()).path
    tokenizer = Tokenizer.open(out / "tokenizer")
    assert tokenizer.encode("ab é<tool>") == [256, 32, 0xC3, 0xA9, 259]
    assert tokenizer.eos_ids == {258}
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<user>hi</s><assistant>"
    assert role == "draft" or tokenizer.generation["temperature"] == 0.7


def test_the_report_says_what_was_made(sources: dict[str, Path], tmp_path: Path) -> None:
    """What the command prints: names, sizes, figures; progress counts to the end in every stage."""
    stages: dict[str, list[tuple[int, int]]] = {}
    report = export_pair(
        request(sources["target"], name="big"),
        request(sources["draft"], name="small"),
        tmp_path / "out",
        settings(verify="quick"),
        on_progress=lambda stage, done, total: stages.setdefault(stage, []).append((done, total)),
    )
    assert report.path == tmp_path / "out"
    assert {role: model.name for role, model in report.models.items()} == {"target": "big", "draft": "small"}
    for role, model in report.models.items():
        assert model.weights_bytes == (tmp_path / "out" / role / "onnx" / "weights.data").stat().st_size
        assert model.quality is not None and model.quality.grade == "faithful"
        assert Bundle.open(report.path).model(role).quality == model.quality.to_dict()
    assert [*stages] == ["target: weights", "target: verify", "draft: weights", "draft: verify", "checksums"]
    for counts in stages.values():
        assert counts[-1][0] == counts[-1][1] and [done for done, _ in counts] == sorted(
            done for done, _ in counts
        )


def test_both_formats_of_one_model_give_one_graph(tmp_path: Path) -> None:
    """D23: the same weights from safetensors and GGUF end as the same bytes."""
    one = export_graph(tmp_path / "one", save_checkpoint(tmp_path / "m", rms_norm_eps=2.0**-20))
    two = export_graph(tmp_path / "two", save_gguf_checkpoint(tmp_path / "m.gguf", rms_norm_eps=2.0**-20))
    assert (one.path.parent / "weights.data").read_bytes() == (two.path.parent / "weights.data").read_bytes()
    assert one.path.read_bytes() == two.path.read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_tied_matrix_is_stored_once(tmp_path: Path, precision: str) -> None:
    """D30: with an embedding that dominates, at most 1.05 of the unique parameters (and the rotary tables)."""
    wide = {"vocab_size": 4096, "tie_word_embeddings": True, "hidden_size": 96}
    source = save_checkpoint(tmp_path / "m", **wide)
    report = export_pair(request(source, precision), None, tmp_path / "out", settings())
    spec = open_checkpoint(source).spec
    n_parameters = sum(int(np.prod(shape)) for shape in expected_tensors(spec).values())
    bits = Schemes.choose(precision).embedding.bits_per_weight
    tables = 2 * 129 * (spec.head_size // 2) * 4
    n_tensors = 40  # each begins on a page
    assert (
        report.models["target"].weights_bytes
        <= 1.05 * n_parameters * bits / 8 + tables + n_tensors * ALIGNMENT
    )


@pytest.mark.parametrize(
    ("precision", "distance", "tied"), [("int8", 0.05, True), ("int8", 0.5, False), ("fp32", 0.05, False)]
)
def test_a_head_that_is_the_embedding_rounded_again_is_stored_once(
    tmp_path: Path, precision: str, distance: float, tied: bool
) -> None:
    """D24, D30: GGUF files of tied models carry the head at another precision. Another head stays another head,
    and fp32 keeps both: sharing them flipped an arg-max of the 0.5B, and its gate refused the export."""

    def add_head(tensors: dict[str, Any]) -> None:
        matrix = tensors["token_embd.weight"]
        noise = np.random.default_rng(0).standard_normal(matrix.shape).astype(np.float32)
        tensors["output.weight"] = matrix + noise * np.float32(distance * matrix.std())

    source = save_gguf_checkpoint(tmp_path / "m.gguf", edit=add_head, tie_word_embeddings=True)
    gate = "quick" if precision == "fp32" else "off"
    out = export_pair(request(source, precision), None, tmp_path / "out", settings(verify=gate)).path
    assert json.loads((out / "target" / "config.json").read_text())["tie_word_embeddings"] is tied


# pairs


def test_a_draft_with_another_vocabulary_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """D07, D10: the first id that differs and both its strings; before any weight is written."""
    vocabulary = json.loads(tiny_tokenizers.byte_level().to_str())
    vocab = vocabulary["model"]["vocab"]
    swapped = {**vocab, "q": vocab["z"], "z": vocab["q"]}
    vocabulary["model"]["vocab"] = swapped
    draft = request(save_checkpoint(tmp_path / "draft", tokenizer=Backend.from_str(json.dumps(vocabulary))))
    message = refused_export(PairError, tmp_path / "empty", request(sources["target"]), draft=draft)
    assert message == (
        "target and draft do not share a vocabulary: id 113 is 'q' in the target and 'z' in the draft; "
        "choose a draft of the target's family"
    )


def test_bytes_that_are_no_characters_are_told_apart(sources: dict[str, Path], tmp_path: Path) -> None:
    """Both show as U+FFFD in a text; a comparison of texts would let the swap pass."""
    vocabulary = json.loads(tiny_tokenizers.byte_level().to_str())
    vocab = vocabulary["model"]["vocab"]
    one, two = (character for character, number in vocab.items() if number in (0xC3, 0xC4))
    vocab[one], vocab[two] = vocab[two], vocab[one]
    draft = request(save_checkpoint(tmp_path / "draft", tokenizer=Backend.from_str(json.dumps(vocabulary))))
    message = refused_export(PairError, tmp_path / "empty", request(sources["target"]), draft=draft)
    assert r"id 195 is b'\xc3' in the target and b'\xc4' in the draft" in message


def test_a_special_token_of_another_name_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """D07 (c): one id is enough, such as another end token; names count, not only ordinary text."""
    other = Backend.from_str(tiny_tokenizers.byte_level().to_str().replace("<tool>", "<other>"))
    draft = request(save_checkpoint(tmp_path / "draft", tokenizer=other))
    message = refused_export(PairError, tmp_path / "empty", request(sources["target"]), draft=draft)
    assert "id 259 is '<tool>' in the target and '<other>' in the draft" in message


def test_a_token_that_only_the_draft_knows_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """D07 (d): a draft that was trained with more tokens would propose them; the target has no such id."""
    more = tiny_tokenizers.byte_level()
    more.add_tokens(["<more>"])
    draft = request(save_checkpoint(tmp_path / "draft", tokenizer=more, vocab_size=ROWS + 50))
    message = refused_export(PairError, tmp_path / "empty", request(sources["target"]), draft=draft)
    assert "id 260 is unused in the target and '<more>' in the draft" in message


def test_a_pair_may_differ_in_padding_and_in_what_only_the_target_knows(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """D07 (b): rows are padded differently in models of one family, and a target may have tokens more."""
    fewer = json.loads(tiny_tokenizers.byte_level().to_str())
    fewer["added_tokens"] = [token for token in fewer["added_tokens"] if token["id"] < 259]
    tokenizer = Backend.from_str(json.dumps(fewer))
    assert tokenizer.get_vocab_size() == 259
    draft = request(save_checkpoint(tmp_path / "draft", tokenizer=tokenizer, vocab_size=ROWS + 50))
    out = export_pair(request(sources["target"]), draft, tmp_path / "out", settings()).path
    assert Bundle.open(out).model("draft").graphs["cpu"].vocab_size == ROWS + 50
    assert Tokenizer.open(out / "tokenizer").vocab_size == 260
    assert {path.name for path in out.iterdir()} == {"target", "draft", "tokenizer", MANIFEST}


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Ids without rows would end in an engine's complaint, or in a wrong row."""
    source = save_checkpoint(tmp_path / "tiny", vocab_size=100, eos_token_id=None)
    message = refused_export(SourceError, tmp_path / "empty", request(source))
    assert message.startswith("target tiny: has 100 rows of embedding, and the target's tokenizer gives id ")


# settings that do not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_layers": (4,)}, "hidden layers must be different state indices in 0..3"),
        ({"hidden_layers": (-5,)}, "or -4..-1, got -5"),
        ({"hidden_layers": (0, -4)}, "got 0, -4"),
        ({"hidden_layers": (1, 1)}, "got 1, 1"),
        ({"pooled_layers": (9,)}, "probe layers must be different state indices in 0..3"),
        ({"max_context": 257}, "max context must be between 2 and 256"),
        ({"max_context": 1}, "got 1"),
        ({"max_context": 0}, "got 0"),
        ({"max_context": -5}, "got -5"),
        ({"max_context": 17, "verify": "quick"}, "the gate needs a context of at least 18 tokens, got 17"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model(
    sources: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """D42: what the model has is in the message."""
    assert message in refused_export(ConfigError, tmp_path / "empty", request(sources["target"]), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graphs": ()}, "graphs must be cpu, and any of cuda, native, primitive behind it; got none"),
        ({"graphs": ("cuda",)}, "got cuda"),
        ({"graphs": ("cpu", "cpu")}, "got cpu,cpu"),
        ({"graphs": ("cpu", "rtx")}, "got cpu,rtx"),
        ({"verify": "fast"}, "verify must be one of quick, full, off, got 'fast'"),
    ],
    ids=str,
)
def test_settings_are_valid_from_birth(changes: dict[str, Any], message: str) -> None:
    """Before any model is opened."""
    with pytest.raises(ConfigError) as caught:
        ExportSettings(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "made"),
    [((0, 1, 2, 3), (0, 1, 2, 3)), ((-1,), (3,)), ((-1, 0, -3), (0, 1, 3)), ((), ())],
    ids=str,
)
def test_state_indices_count_from_both_ends(
    sources: dict[str, Path], tmp_path: Path, asked: tuple[int, ...], made: tuple[int, ...]
) -> None:
    """D42: 0 the embedding, 3 after the final norm, -1 the same."""
    out = export_pair(request(sources["target"]), None, tmp_path / "out", settings(hidden_layers=asked)).path
    assert Bundle.open(out).model("target").graphs["cpu"].hidden_layers == made


def test_the_context_defaults_to_what_the_model_can(sources: dict[str, Path], tmp_path: Path) -> None:
    """8192, or what it was trained for if that is less."""
    out = export_pair(request(sources["target"]), None, tmp_path / "out", settings(max_context=None)).path
    assert Bundle.open(out).model("target").graphs["cpu"].max_context == 256


def test_a_tied_head_has_one_precision(sources: dict[str, Path], tmp_path: Path) -> None:
    """It is stored once; two precisions for it are a contradiction, said before any work."""
    asked = request(sources["draft"], "int8", head="int4", embedding="int8")
    message = refused_export(ConfigError, tmp_path / "empty", asked)
    assert "head precision int4 block 32 and embedding precision int8 block 32 must be equal" in message
    untied = request(sources["target"], "int8", head="int4", embedding="int8")
    out = export_pair(untied, None, tmp_path / "out", settings()).path
    assert Bundle.open(out).model("target").precision["head"] == "int4 block 32"


def test_an_output_that_exists_is_refused_before_the_work(sources: dict[str, Path], tmp_path: Path) -> None:
    """And replaced with force, here by the other model."""
    out = export_pair(request(sources["target"]), None, tmp_path / "out", settings()).path
    before = tree(out)
    with pytest.raises(BundleError, match="out exists; choose another --out, or --force to replace it"):
        export_pair(request(sources["draft"]), None, out, settings())
    assert tree(out) == before
    export_pair(request(sources["draft"]), None, out, settings(), force=True)
    assert json.loads((out / "target" / "config.json").read_text())["model_type"] == "qwen2"
