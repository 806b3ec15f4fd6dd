"""Measure export and plain decoding of the three real models beside other engines: `make bench`.

For each model, in one run: two bundles (as exported without data, and with activation ranges), onnxruntime-genai with
its own int4 export of the same weights, and llama.cpp on the GGUF itself. Their answers take turns, so what slows the
machine slows all; a speed is the median of the rounds, and the ratio to each peer the median of the rounds' ratios
with the smallest and the largest. Beside every speed: bits per weight, and KL and top-1 against the de-quantized GGUF
on the gate's text, which no ranges were taken from. Peers that are not installed are left out and named.

Prints a table for people and, last, one JSON line for programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from gguf import GGUFReader

from semspec import LLM, SamplingParams, SpecConfig
from semspec.calibration.bench.originals import find_original, make_genai
from semspec.calibration.bench.peers import Peer, open_peer
from semspec.export.checkpoint import expected_tensors, open_checkpoint
from semspec.export.quantize import INFORMED
from semspec.export.verify import closeness
from semspec.models.reference import run_reference
from semspec.models.spec import ModelSpec
from semspec.runtime.backends.base import Session, Tensor
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats
from semspec.runtime.tokenizer import Tokenizer

RECIPES = {"SmolLM2-135M": "smollm2-135m", "Coder-0.5B": "qwen2.5-coder-0.5b", "Coder-1.5B": "qwen2.5-coder"}
PEERS = ("genai", "llama")
VARIANTS = ("default", "ranges")
PROMPT = "Explain in ten sentences, step by step, how to add two fractions with different denominators."
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.6, top_p=0.95, seed=0)
TEXT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine on one model.

    export_s, peak_mib: of making it from the checkpoint (ranges apart: ranges_s), None where nothing is made.
    stored_mib: weights on disk. bits: of each weight that a step reads: all but an embedding of its own.
    speeds: tokens/s after the first token, by round. gb_per_s: weights read per second at the median speed.
    outside: share of the wall time outside the engine's passes, greedy and sampled.
    """

    model: str
    engine: str
    export_s: float | None
    ranges_s: float | None
    peak_mib: float | None
    stored_mib: float
    bits: float
    kl: float
    top1: float
    speeds: tuple[float, ...]
    gb_per_s: float
    outside: tuple[float, float] | None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds of 64 tokens")
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        help="default; ranges: the default with them; or such as awq/64, or gptq/128,int4/64 with the head's",
    )
    parser.add_argument("--work", type=Path, help="keep bundles, ranges and peers' exports here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = (options.work or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        rows = []
        for name in options.models:
            found = measure(name, work, options)
            print_table(found)
            rows += found
    print(json.dumps([asdict(row) for row in rows]))


def measure(name: str, work: Path, options: argparse.Namespace) -> list[Row]:
    """All engines on one model, open at once and taking turns."""
    made = {variant: export(name, variant, work) for variant in options.variants}
    first = next(iter(made.values()))["bundle"]
    original = find_original(Bundle.open(first), "target")
    ids, truth = reference(first, original)
    with ExitStack() as stack:
        engines: dict[str, LLM | Peer] = {
            variant: stack.enter_context(LLM(cost["bundle"], spec=SpecConfig(mode="autoregressive")))
            for variant, cost in made.items()
        }
        for peer in options.peers:
            try:
                engines[peer] = stack.enter_context(open_peer(peer, first, work=work / "peers"))
            except ConfigError as error:
                print(f"{peer} is left out: {error}", file=sys.stderr)
        quality = {engine: closeness(truth, logits_of(one, ids)) for engine, one in engines.items()}
        chat = [{"role": "user", "content": PROMPT}]
        prompt = Tokenizer.open(Bundle.open(first).tokenizer).encode_chat(chat)
        speeds = take_turns(engines, prompt, options.repeats)
        outside = {
            engine: (share_outside(one, prompt, GREEDY), share_outside(one, prompt, SAMPLED))
            for engine, one in engines.items()
            if isinstance(one, LLM)
        }
    sizes = weights_of(open_checkpoint(original).spec)
    rows = []
    for engine, rates in speeds.items():
        cost = made.get(engine) or peer_cost(engine, first, work, original)
        rows.append(
            Row(
                model=name,
                engine=engine,
                export_s=cost["export_s"],
                ranges_s=cost.get("ranges_s"),
                peak_mib=cost["peak_mib"],
                stored_mib=cost["stored"] / 2**20,
                bits=8 * cost["read"] / sizes,
                kl=quality[engine][0],
                top1=quality[engine][1],
                speeds=tuple(rates),
                gb_per_s=cost["read"] * statistics.median(rates) / 1e9,
                outside=outside.get(engine),
            )
        )
    return rows


def export(name: str, variant: str, work: Path) -> dict[str, Any]:
    """The bundle of one variant, made in a process of its own unless it is there, and what making it took."""
    out, note = (
        work / f"{name}-{variant.replace('/', '-')}",
        work / f"{name}-{variant.replace('/', '-')}.json",
    )
    if not note.exists():
        semspec("fetch", RECIPES[name])
        layers, _, head = variant.partition(",")
        quantizer, _, block = layers.partition("/")
        arguments = ["--target", RECIPES[name], "--out", str(out), "--json", "--force"]
        ranges_s = None
        if quantizer not in VARIANTS:
            arguments += ["--block-size", block, "--quantizer", quantizer]
        if head:
            arguments += ["--head-precision", head]
        if quantizer in ("ranges", *INFORMED):
            path = work / f"{name}.ranges"
            started = time.perf_counter()
            if not path.exists():
                semspec("calibrate", "--target", RECIPES[name], "--ranges", str(path))
                (work / f"{name}.ranges.s").write_text(str(time.perf_counter() - started))
            ranges_s = float((work / f"{name}.ranges.s").read_text())
            arguments += ["--ranges", str(path)]
        report = json.loads(semspec("export", *arguments).splitlines()[-1])
        target = report["models"]["target"]
        found = {"bundle": str(out), "ranges_s": ranges_s, "peak_mib": report["peak_mib"]}
        found |= {
            "export_s": target["export_s"],
            "stored": target["weights_bytes"],
            "read": target["weights_bytes"],
        }
        note.write_text(json.dumps(found))
    cost: dict[str, Any] = json.loads(note.read_text())
    return {**cost, "bundle": Path(cost["bundle"])}


def semspec(*arguments: str) -> str:
    """The command's stdout, from a process of its own."""
    command = [sys.executable, "-c", "from semspec.cli import main; main()", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def peer_cost(engine: str, bundle: Path, work: Path, original: Path) -> dict[str, Any]:
    """What a peer's files hold, and what making them took."""
    if engine == "llama":
        tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(original).tensors}
        stored = sum(tensors.values())
        unread = tensors["token_embd.weight"] if "output.weight" in tensors else 0
        return {"export_s": None, "peak_mib": None, "stored": stored, "read": stored - unread}
    folder, cost = make_genai(Bundle.open(bundle), "target", work / "peers")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    gathered = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    unread = sum(
        int(entry.value)
        for tensor in model.graph.initializer
        if tensor.name in gathered and "embed" in tensor.name
        for entry in tensor.external_data
        if entry.key == "length"
    )
    return {
        "export_s": cost.seconds,
        "peak_mib": cost.peak_mib,
        "stored": cost.n_bytes,
        "read": cost.n_bytes - unread,
    }


def weights_of(spec: ModelSpec) -> int:
    """Weights that a step reads: the layers and the head."""
    shapes = expected_tensors(replace(spec, tied=True))
    return sum(int(np.prod(shape)) for shape in shapes.values())


def reference(bundle: Path, original: Path) -> tuple[list[int], Floats]:
    """The gate's text as ids, (S,), and the de-quantized checkpoint's logits over it, (S, V)."""
    text = resources.files("semspec.export").joinpath("gate_text.txt").read_text("utf-8")
    ids = Tokenizer.open(Bundle.open(bundle).tokenizer).encode(text)[:TEXT_TOKENS]
    checkpoint = open_checkpoint(original)
    return ids, run_reference(checkpoint.spec, checkpoint, ids).logits


def logits_of(engine: LLM | Peer, ids: list[int]) -> Floats:
    if isinstance(engine, Peer):
        return engine.logits(ids)
    engine.target.rewind(0)
    found = engine.target.forward(ids, rows=range(len(ids))).logits
    engine.target.rewind(0)
    return found


def take_turns(engines: Mapping[str, LLM | Peer], prompt: list[int], repeats: int) -> dict[str, list[float]]:
    """Tokens/s after the first token, by round; who begins changes from round to round."""
    names = list(engines)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, repeats):  # the first round reads weights from the disk and does not count
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            rate = speed_of(engines[name], prompt)
            if turn >= 0:
                speeds[name].append(rate)
    return speeds


def speed_of(engine: LLM | Peer, prompt: list[int]) -> float:
    if isinstance(engine, Peer):
        answer = engine.generate(prompt, GREEDY)
        engine.forget()
        assert answer.ttft_s is not None and len(answer.token_ids) == GREEDY.max_tokens
        return (len(answer.token_ids) - 1) / (answer.seconds - answer.ttft_s)
    engine.target.rewind(0)
    tpot_ms = engine.generate(prompt, GREEDY).stats.tpot_ms
    assert tpot_ms is not None
    return 1000 / tpot_ms


class TimedSession:
    """A session that adds up the seconds of its passes."""

    def __init__(self, session: Session) -> None:
        self.session, self.seconds = session, 0.0

    def run(self, feeds: Mapping[str, Array], fetch: Sequence[str]) -> dict[str, Tensor]:
        started = time.perf_counter()
        found = self.session.run(feeds, fetch)
        self.seconds += time.perf_counter() - started
        return found

    def close(self) -> None:
        self.session.close()


def share_outside(llm: LLM, prompt: list[int], sampling: SamplingParams) -> float:
    """Share of an answer's wall time outside the engine's passes; median of 5."""
    session = llm.target._session
    timed = llm.target._session = TimedSession(session)  # type: ignore[assignment]
    shares = []
    for _ in range(5):
        llm.target.rewind(0)
        timed.seconds, started = 0.0, time.perf_counter()
        llm.generate(prompt, sampling)
        shares.append(1 - timed.seconds / (time.perf_counter() - started))
    llm.target._session = session
    return statistics.median(shares)


def print_table(rows: Sequence[Row]) -> None:
    print(f"\n{rows[0].model}")
    print(
        f"{'':<12}{'export s':>9}{'ranges s':>9}{'peak MiB':>9}{'MiB':>7}{'bits':>6}{'KL':>8}{'top-1':>7}"
        f"{'tokens/s (min-max)':>22}{'GB/s':>6}{'outside, sampled':>17}"
    )
    for row in rows:
        median, low, high = statistics.median(row.speeds), min(row.speeds), max(row.speeds)
        costs = "".join(
            f"{'' if value is None else format(value, '.0f'):>9}"
            for value in (row.export_s, row.ranges_s, row.peak_mib)
        )
        outside = "" if row.outside is None else "{:.1%} {:.1%}".format(*row.outside)
        print(
            f"{row.engine:<12}{costs}{row.stored_mib:>7.0f}{row.bits:>6.2f}{row.kl:>8.4f}{row.top1:>7.3f}"
            f"{f'{median:.1f} ({low:.1f}-{high:.1f})':>22}{row.gb_per_s:>6.1f}{outside:>17}"
        )
    for row in rows:
        if row.engine in PEERS:
            print(
                f"times {row.engine}: "
                + ", ".join(f"{one.engine} {ratio(one, row)}" for one in rows if one != row)
            )


def ratio(one: Row, other: Row) -> str:
    """Of their speeds, round by round: median, smallest and largest."""
    ratios = [ours / theirs for ours, theirs in zip(one.speeds, other.speeds, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
