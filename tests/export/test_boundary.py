"""The boundary a bundle gets where nobody says: reasoning models pause at blank lines, others at lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_pairs
import tiny_tokenizers
from tokenizers import AddedToken

from semspec.export.boundary import fit_boundary
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import ConfigError
from semspec.runtime.segments import Boundary, parse_boundary
from semspec.runtime.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


def tokenizer(folder: Path, *, token: bool = True, template: str = TEMPLATE) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    if token:
        backend.add_tokens([AddedToken("</think>", special=False)])
    return Tokenizer.open(tiny_tokenizers.save(folder, backend, template=template))


def test_a_reasoning_model_has_the_token_and_a_template_that_knows_it(tmp_path: Path) -> None:
    """The paper's rule for its models; families share vocabularies, so the token alone says little."""
    reasoning = tokenizer(tmp_path / "reasoning")
    assert reasoning.reasons and reasoning.think_end_id == 260
    assert fit_boundary(None, None, reasoning) == Boundary(kind="blank-line", min_tokens=1, max_tokens=500)
    for name, options in (("token", {"token": False}), ("template", {"template": "{{ messages }}"})):
        plain = tokenizer(tmp_path / name, **options)  # type: ignore[arg-type]
        assert not plain.reasons
        assert fit_boundary(None, None, plain) == Boundary(kind="newline", min_tokens=12, max_tokens=64)


def test_a_cap_shrinks_what_it_caps(tmp_path: Path) -> None:
    """Of whatever rule applies; the least length cannot stay above it."""
    plain = tokenizer(tmp_path, token=False)
    assert fit_boundary(None, 9, plain) == Boundary(min_tokens=9, max_tokens=9)
    asked = parse_boundary("sentence:3-40")
    assert fit_boundary(asked, 20, plain) == Boundary(kind="sentence", min_tokens=3, max_tokens=20)


def test_ids_that_the_tokenizer_lacks_are_refused(tmp_path: Path) -> None:
    """They would never end a segment, and nobody would notice."""
    with pytest.raises(ConfigError, match=r"boundary id 260 is not in the tokenizer, whose ids are 0\.\.259"):
        fit_boundary(parse_boundary("ids=10,260"), None, tokenizer(tmp_path, token=False))


def test_the_bundle_says_where_its_segments_end(tmp_path: Path) -> None:
    """Asked for or not; ids too are read back."""
    checkpoint = tiny_pairs.request(tiny_pairs.save_checkpoint(tmp_path / "checkpoint"))
    asked = parse_boundary("ids=10,32:1-9")
    for name, given, expected in (("asked", asked, asked), ("not", None, Boundary())):
        out = export_pair(checkpoint, None, tmp_path / name, tiny_pairs.settings(boundary=given)).path
        assert Bundle.open(out).manifest.boundary == expected
