"""Tiny checkpoints that can be exported: random weights with a tokenizer, chat template and end tokens.

Every model of this file shares one byte-level vocabulary (tiny_tokenizers.byte_level: ids 0..255 are the bytes,
256 "ab", 257 <s>, 258 </s>, 259 <tool>) padded to 270 rows, so any two of them are a pair.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_tokenizers
from safetensors.numpy import load_file, save_file
from tiny import save_tiny, tiny_model
from tiny_gguf import write_gguf
from tokenizers import Tokenizer

from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.plan import ExportSettings, ModelRequest
from semspec.runtime.bundle import MANIFEST
from semspec.runtime.errors import SemspecError

ROWS = 270  # of the embedding; 260 are tokens
EOS_ID = 258
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GENERATION = {"eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.7, "top_p": 0.9}


def save_checkpoint(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    shard: str = "5GB",
    **changes: Any,
) -> Path:
    """A folder as a hub would give it: config, safetensors (sharded by `shard`), the files of a tokenizer, licence.

    tokenizer: another than byte_level(). changes: keys of config.json, such as tie_word_embeddings=True.
    """
    save_tiny(folder, family, seed, shard=shard, **{"vocab_size": ROWS, "eos_token_id": EOS_ID, **changes})
    tiny_tokenizers.save(
        folder, tokenizer or tiny_tokenizers.byte_level(), generation=GENERATION, template=TEMPLATE
    )
    (folder / "LICENSE").write_text("Apache-2.0\n", encoding="utf-8")
    return folder


def perturb(folder: Path, deviation: float) -> Path:
    """Add normal noise to every weight of a checkpoint, `deviation` of its own deviation; returns the folder."""
    rng = np.random.default_rng(0)
    for file in folder.glob("*.safetensors"):
        arrays = load_file(file)
        changed = {
            name: (array + deviation * array.std() * rng.standard_normal(array.shape)).astype(np.float32)
            for name, array in arrays.items()
        }
        save_file(changed, file, metadata={"format": "pt"})
    return folder


def bound(bundle: Path, out: Path, **boundary: Any) -> Path:
    """The same bundle with segments that end elsewhere. boundary: what of the rule changes, such as max_tokens=7."""
    shutil.copytree(bundle, out)
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    manifest["boundary"] |= boundary
    (out / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return out


def rearrange(bundle: Path, out: Path, **roles: str) -> Path:
    """The same bundle with its models in other roles: target="draft", or draft="target" for a model with itself."""
    shutil.copytree(bundle / "tokenizer", out / "tokenizer")
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    files = {name: entry for name, entry in manifest["files"].items() if name.startswith("tokenizer/")}
    for role, source in roles.items():
        shutil.copytree(bundle / source, out / role)
        for name, entry in manifest["files"].items():
            if name.startswith(f"{source}/"):
                files[role + name[len(source) :]] = entry
    manifest["models"] = {role: manifest["models"][source] for role, source in roles.items()}
    (out / MANIFEST).write_text(json.dumps({**manifest, "files": files}), encoding="utf-8")
    return out


def save_gguf_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, *, tokenizer: Tokenizer | None = None, **changes: Any
) -> Path:
    """The same model and vocabulary as one GGUF file. changes: keys of config.json, or arguments of write_gguf."""
    written = {name: changes.pop(name) for name in ("edit", "types", "leave_out") if name in changes}
    model = tiny_model(family, seed, **{"vocab_size": ROWS, "eos_token_id": EOS_ID, **changes})
    vocabulary = json.loads((tokenizer or tiny_tokenizers.byte_level()).to_str())

    def keys(writer: gguf.GGUFWriter) -> None:
        added = {token["id"]: token for token in vocabulary["added_tokens"]}
        ids = {number: text for text, number in vocabulary["model"]["vocab"].items()}
        ids |= {number: token["content"] for number, token in added.items()}
        unused = range(len(ids), model.config.vocab_size)
        kinds = {number: 3 if token["special"] else 4 for number, token in added.items()}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([ids[n] for n in range(len(ids))] + [f"[PAD{n}]" for n in unused])
        writer.add_token_types([kinds.get(n, 1) for n in range(len(ids))] + [5 for _ in unused])
        writer.add_token_merges([" ".join(pair) for pair in vocabulary["model"]["merges"]])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(EOS_ID)
        writer.add_chat_template(TEMPLATE)
        writer.add_string("general.license", "apache-2.0")

    return write_gguf(path, model, keys=keys, **written)


def request(path: Path, precision: str = "fp32", *, name: str = "", **choices: Any) -> ModelRequest:
    """How export_pair is asked for `path`. choices: arguments of Schemes.choose (head, block_size, ...)."""
    return ModelRequest(
        path=path,
        name=name or path.stem,
        source=path.name,
        schemes=Schemes.choose(precision, **choices),
        licence="apache-2.0",
    )


def settings(**changes: Any) -> ExportSettings:
    """Settings of a tiny export: 128 tokens of context, no gate (random weights fail it in int4)."""
    return ExportSettings(**{"max_context": 128, "verify": "off", **changes})


def refused_export(
    error: type[SemspecError],
    folder: Path,
    target: ModelRequest,
    draft: ModelRequest | None = None,
    **changes: Any,
) -> str:
    """The one line that an export into `folder`, made if it is missing, ends with; it has left nothing there."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(error) as caught:
        export_pair(target, draft, folder / "out", settings(**changes))
    assert not list(folder.iterdir()), "something was left behind"
    message = str(caught.value)
    assert "\n" not in message
    return message


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path inside, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
