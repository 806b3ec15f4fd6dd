"""Peers that CI does not install, on a real model where they are: what they say follows from their own logits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from semspec.calibration.bench.originals import make_hf
from semspec.calibration.bench.peers import open_peer
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.llm import LLM

MESSAGES = [{"role": "user", "content": "Repeat three times: the quick brown fox jumps over the lazy dog."}]
GREEDY = SamplingParams(max_tokens=40)


def needs(module: str) -> pytest.MarkDecorator:
    """Skip where the peer's library is not installed."""
    return pytest.mark.skipif(
        find_spec(module) is None, reason=f"{module} is not installed: an optional peer"
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what peers read is made, once for all tests here."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("genai", marks=needs("onnxruntime_genai")),
        pytest.param("genai-ngram:4", marks=needs("onnxruntime_genai")),
        pytest.param("llama", marks=needs("llama_cpp")),
        pytest.param("llama-lookup:4", marks=needs("llama_cpp")),
    ],
)
def test_a_peer_says_what_its_logits_say(name: str, smollm2_bundle: Path, work: Path) -> None:
    """Greedy: the arg-max of its own rows, up to rounding between one row and many; and much of what ours say."""
    with LLM(smollm2_bundle, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        prompt = llm.tokenizer.encode_chat(MESSAGES)
        with open_peer(name, smollm2_bundle, work=work, threads=1) as peer:
            answer = peer.generate(prompt, GREEDY)
            peer.forget()
            assert peer.generate(prompt, GREEDY).token_ids == answer.token_ids
            ids = [*prompt, *answer.token_ids]
            logits = peer.logits(ids)
        ours = llm.target.forward(ids, rows=range(len(ids))).logits.argmax(axis=1)
    assert logits.dtype == np.float32 and logits.shape[0] == len(ids)
    said = logits.argmax(axis=1)
    written = said[len(prompt) - 1 : -1] == np.array(answer.token_ids)
    assert written.mean() > 0.9 and (said == ours).mean() > 0.6
    assert answer.finish_reason in ("stop", "length") and len(answer.token_ids) <= 40
    if ":" in name:
        assert (answer.rounds or 0) < len(answer.token_ids) and (answer.accepted or 0) > 0
    if name.startswith("genai"):
        assert peer.made is not None and peer.made.seconds > 0 and peer.made.n_bytes > 50_000_000


def test_the_folder_for_peers_is_read_by_transformers(smollm2_bundle: Path, work: Path) -> None:
    """A real tokenizer and configuration: the same ids for a chat, and the model that was exported."""
    import transformers

    bundle = Bundle.open(smollm2_bundle)
    folder = make_hf(bundle, "target", work)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with LLM(smollm2_bundle, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
        assert ids == llm.tokenizer.encode_chat(MESSAGES)
    assert config.num_hidden_layers == 30 and config.tie_word_embeddings
