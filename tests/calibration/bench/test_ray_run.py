"""A run spread over a real Ray cluster of two nodes: same answers, nothing measured twice, faults in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest

from semspec.calibration.bench.data import read_problems
from semspec.calibration.bench.journal import CELLS, DIVERGENCES, RESULTS, RUN, read_cells, read_origin
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.run import run
from semspec.runtime.bundle import MANIFEST, sha256_of
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError, BundleError, ConfigError

SMALL = ("--max-tokens", 16, "--modes", "autoregressive,ngram", "--temperature", 0, "--threads", 1)
DEAD = "127.0.0.1:1"


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes with one CPU each, of another process: Ray's takes its handlers of signals over."""
    pytest.importorskip("ray")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], text=True, start_new_session=True, **pipes
    ) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()


def spread(folder: Path, bundle: Path, data: Path, *more: object, **how: Any) -> commands.Done:
    given = ("bench", bundle, "--data", data, "--out", "out", *SMALL, *more)
    return commands.run("semspec", *given, cwd=folder, **how)


def test_a_spread_run_gives_the_answers_of_one_machine(
    cluster: str, bench_pair: Path, data_file: Path, tmp_path: Path
) -> None:
    """A part a node, joined in --out; the first one was begun before, and goes on. Once all is finished, the same
    command needs no cluster and changes no byte."""
    asked = (bench_pair, read_problems(data_file), parse_modes(["autoregressive", "ngram"]))
    out, names = tmp_path / "out", {RUN, CELLS, DIVERGENCES, RESULTS}
    sampling = SamplingParams(max_tokens=16, top_p=0.95)
    whole = run(*asked, tmp_path / "whole", sampling, threads=1)
    run(*asked, out / "shards" / "1", sampling, threads=1, shard=(1, 2))
    begun = cut_short(out / "shards" / "1")
    done = spread(tmp_path, bench_pair, data_file, "--ray", cluster, "--json")
    assert done.status == 0, done
    assert json.loads(done.out)["out"] == "out" and "measuring: 8 of 8" in done.err
    assert {path.name for path in out.iterdir()} == names | {"shards", "report.html"}
    shards = sorted((out / "shards").iterdir())
    assert [read_origin(shard).shard for shard in shards] == [(1, 2), (2, 2)]
    assert all({path.name for path in shard.iterdir()} == names for shard in shards)
    assert (shards[0] / CELLS).read_bytes().startswith(begun) and len(read_origin(out).machines) == 2
    found = {one.cell: (one.token_ids, one.correct) for one in read_cells(out / CELLS)}
    assert found == {one.cell: (one.token_ids, one.correct) for one in whole.results}
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert spread(tmp_path, bench_pair, data_file, "--ray", DEAD).status == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def cut_short(shard: Path) -> bytes:
    """Take the end of a run away, as a kill in the middle of a line does. The whole lines that are left."""
    for name in (DIVERGENCES, RESULTS):
        (shard / name).unlink()
    line = (shard / CELLS).read_bytes().splitlines(keepends=True)[0]
    (shard / CELLS).write_bytes(line + b'{"cell":')
    return line


def test_an_interrupted_run_goes_on_where_it_was(
    cluster: str, bench_pair: Path, data_file: Path, tmp_path: Path
) -> None:
    """Ctrl-C in two parts side by side here, then a termination on the cluster that went on with them: each time
    they stop and clean up, and what they measured stays."""
    given = [
        "bench",
        bench_pair,
        "--data",
        data_file,
        "--out",
        "out",
        *SMALL,
        "--max-tokens",
        96,
        "--repeats",
        400,
    ]
    (tmp_path / "temporary").mkdir()
    folders = {"TMPDIR": str(tmp_path / "temporary"), "RAY_TMPDIR": tempfile.gettempdir()}
    journals = [tmp_path / "out" / "shards" / index / CELLS for index in "12"]
    kept = [b"", b""]
    for where, number, status in (
        (["local", "--ray-workers", 2], signal.SIGINT, 130),
        ([cluster], signal.SIGTERM, 143),
    ):
        with commands.start("semspec", *given, "--ray", *where, cwd=tmp_path, **folders) as process:
            while any(size_of(journal) == len(old) for journal, old in zip(journals, kept, strict=True)):
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            process.send_signal(number)
            done = commands.finish(process)
        assert done.status == status and not done.out, done
        assert not list((tmp_path / "temporary").glob("semspec-bench-*"))
        before, kept = kept, [journal.read_bytes() for journal in journals]
        assert all(new.startswith(old) and new != old for new, old in zip(kept, before, strict=True))
        assert sum(len(read_cells(journal)) for journal in journals) < 3200


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_fault_on_a_node_is_one_line(cluster: str, bench_pair: Path, tmp_path: Path) -> None:
    """With the shard and the node; what was measured before is kept, here nothing."""
    questions = {"short": "2+3?", "long": "x" * 9000, "other": "Why?"}
    rows = [{"id": name, "question": question} for name, question in questions.items()]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = spread(tmp_path, bench_pair, tmp_path / "data.jsonl", "--ray", cluster)
    assert done.status == 2 and not done.out
    assert "semspec: shard 2/2 on node " in done.err and "'long' has" in done.err.splitlines()[-1]
    assert not (tmp_path / "out" / RESULTS).exists()


def test_nodes_are_checked_before_anything_is_measured(
    cluster: str, bench_pair: Path, tmp_path: Path
) -> None:
    """Another bundle under the same path would be measured under a wrong name."""
    from semspec.calibration.bench.ray_cluster import check_nodes, connect, find_nodes

    sha256 = sha256_of(bench_pair / MANIFEST)
    handler = signal.getsignal(signal.SIGTERM)
    with connect(cluster) as ray:
        assert signal.getsignal(signal.SIGTERM) is handler
        nodes = find_nodes(ray, None, "cpu")
        assert [(node.cpus, node.slots) for node in nodes] == [(1, 1), (1, 1)]
        machines = check_nodes(ray, nodes, bench_pair, sha256)
        assert [machine["cores"] >= 1 for machine in machines.values()] == [True, True]
        with pytest.raises(
            BundleError, match=r"node .* \(.*\): .*none.*; the bundle must be at the same path"
        ):
            check_nodes(ray, nodes, tmp_path / "none", sha256)
        with pytest.raises(BundleError, match=rf"another bundle at .*{sha256[:12]} there and 0{{12}} here"):
            check_nodes(ray, nodes, bench_pair, "0" * 64)
        for threads, backend, message in ((2, "cpu", "has 2 CPUs"), (None, "cuda", "1 CPUs and a GPU")):
            with pytest.raises(ConfigError, match=message):
                find_nodes(ray, threads, backend)


def test_a_node_that_is_lost_or_lacks_a_library_is_named(cluster: str) -> None:
    """What happens hours later, in the night: the line must say where, and what to do."""
    from semspec.calibration.bench.ray_cluster import connect, fetch, find_nodes, remote_on

    def lacks() -> None:
        raise ModuleNotFoundError("No module named 'math_verify'", name="math_verify")

    def dies() -> None:
        os._exit(1)

    with connect(cluster) as ray:
        node = find_nodes(ray, 1, "cpu")[0]
        for task, message in (
            (lacks, r"n: No module named 'math_verify'; install .* pip"),
            (dies, r"n was lost \(.*\); run the"),
        ):
            with pytest.raises(BackendError, match=message):
                fetch(ray, remote_on(ray, node, task, cpus=0).remote(), "n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--ray", DEAD], 1, "nobody answers"),
        (["--ray", "nonsense"], 2, "--ray nonsense: Invalid address format"),
        (["--ray", DEAD, "--ray-workers", 5], 2, "4 problems cannot be split into 5 shards"),
        (["--ray", DEAD, "--data", "none.jsonl"], 1, "cannot read none.jsonl"),
    ],
)
def test_a_fault_before_the_nodes_is_one_line(
    bench_pair: Path, data_file: Path, tmp_path: Path, arguments: list[object], status: int, message: str
) -> None:
    """And nothing is left; a dead address is told in seconds, not after Ray's two minutes."""
    pytest.importorskip("ray")
    assert message in commands.one_line(spread(tmp_path, bench_pair, data_file, *arguments), status)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "local", "--shard", "1/2"], "leave --shard out"),
        (["--ray-workers", 2], "goes with --ray"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    bench_pair: Path, data_file: Path, tmp_path: Path, arguments: list[object], message: str
) -> None:
    """A part of a spread run, or workers of no cluster, would be silently something else."""
    done = spread(tmp_path, bench_pair, data_file, *arguments)
    assert done.status == 2 and message in done.err and not list(tmp_path.iterdir())


def test_a_missing_ray_names_its_pip_command(bench_pair: Path, data_file: Path, tmp_path: Path) -> None:
    """The extra is optional."""
    done = spread(tmp_path, bench_pair, data_file, "--ray", "local", without=["ray"])
    assert "pip install 'semspec[ray]'" in commands.one_line(done, 1) and not list(tmp_path.iterdir())
