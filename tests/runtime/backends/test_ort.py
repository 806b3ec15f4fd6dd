"""ONNX Runtime sessions on graphs of a few nodes: inputs held against the graph, buffers, and orderly ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from sum_graph import feeds, save, write_graph

from semspec.runtime.backends import BACKENDS, open_backend
from semspec.runtime.backends.ort import MAX_PLANS, OrtBackend, OrtSession, OrtTensor
from semspec.runtime.errors import BackendError, ConfigError
from semspec.runtime.records import Array, TensorSpec


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph") / "sums.onnx")


@pytest.fixture
def session(graph: Path) -> Iterator[OrtSession]:
    """Opened, with `total` bound to a buffer of zeros."""
    backend = open_backend("cpu", threads=1)
    opened = backend.open(graph)
    opened.bind("total", "total_out", backend.zeros((2,), "float32"))
    yield opened  # type: ignore[misc]
    opened.close()


def test_inputs_and_outputs_are_those_of_the_graph(session: OrtSession) -> None:
    """The contract is checked against these: names, numpy's names of dtypes, letters for free sizes."""
    assert session.inputs == (
        TensorSpec("x", "float32", ("S", 2)),
        TensorSpec("factor", "float32", (1,)),
        TensorSpec("total", "float32", (2,)),
    )
    assert [spec.name for spec in session.outputs] == ["scaled", "total_out"]


def test_only_what_is_fetched_comes_back(session: OrtSession) -> None:
    """An output that nobody asked for costs nothing."""
    found = session.run(feeds(), ["scaled"])
    assert found.keys() == {"scaled"}
    assert found["scaled"].shape == (3, 2)
    assert (found["scaled"].numpy() == 2).all()
    assert session.run(feeds(), []) == {}


def test_bound_buffer_is_updated_in_place(graph: Path) -> None:
    """A key/value cache is such a buffer: bound once, never copied, kept over calls of any shape."""
    backend = open_backend("cpu", threads=1)
    session, total = backend.open(graph), backend.zeros((2,), "float32")
    session.bind("total", "total_out", total)
    for n_rows in (3, 1, 3):
        session.run(feeds(n_rows), ["scaled"])
    assert total.numpy().tolist() == [7, 7]
    session.close()


def test_what_a_run_returned_is_overwritten_by_the_next_of_the_same_shape(session: OrtSession) -> None:
    """Said in capitals in base.py; if this ever changes, the copies above can go."""
    first = session.run(feeds(factor=2), ["scaled"])["scaled"].numpy()
    other = session.run(feeds(n_rows=2, factor=3), ["scaled"])["scaled"].numpy()
    session.run(feeds(factor=5), ["scaled"])
    assert (first == 5).all()
    assert (other == 3).all()


def test_fed_arrays_may_change_or_go_after_the_call(session: OrtSession) -> None:
    """The engine reads a copy: a caller's array is the caller's."""
    given = feeds()
    result = session.run(given, ["scaled"])["scaled"].numpy()
    given["x"].fill(9)
    assert (result == 2).all()


def test_dropping_or_changing_the_returned_dict_does_not_free_the_memory_of_the_engine(
    session: OrtSession,
) -> None:
    """The engine writes to addresses: a buffer that a caller could free would be written after its end."""
    for _ in range(50):
        found = session.run(feeds(), ["scaled"])
        found.clear()
    assert (session.run(feeds(), ["scaled"])["scaled"].numpy() == 2).all()


def test_wrong_inputs_are_named_all_at_once(session: OrtSession) -> None:
    """Someone who builds feeds mends them in one go, not one error after the other."""
    wrong = {
        "x": np.ones((3, 4), np.float64),
        "total": np.zeros(2, np.float32),  # bound, so not to be fed
        "extra": np.zeros(1),
    }
    with pytest.raises(BackendError) as caught:
        session.run(wrong, ["scaled"])
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "factor is missing",
        "extra is unknown",
        "total is unknown",
        "x is float64[3, 4], expected float32['S', 2]",
    ):
        assert part in message


@pytest.mark.parametrize(
    "x",
    [
        np.ones((3, 2), np.float64),
        np.ones((3, 2), np.int32),
        np.ones((3, 2), ">f4"),
        np.ones((3, 3), np.float32),
        np.ones(2, np.float32),
        np.ones((1, 3, 2), np.float32),
    ],
    ids=lambda x: f"{x.dtype.str}{x.shape}",
)
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_another_dtype_or_shape_is_never_cast_or_broadcast(session: OrtSession, x: Array, warm: bool) -> None:
    """Buffers of a shape are kept: the check must hold for the hundredth call as for the first."""
    if warm:
        session.run(feeds(), ["scaled"])
    with pytest.raises(BackendError, match=r"x is .*, expected float32"):
        session.run(feeds(x=x), ["scaled"])
    assert (session.run(feeds(), ["scaled"])["scaled"].numpy() == 2).all()


def test_failed_pass_is_one_line_and_the_session_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An id outside the embedding is such a pass; a server must survive it."""
    value = helper.make_tensor_value_info
    inputs = [value("table", TensorProto.FLOAT, [4]), value("ids", TensorProto.INT64, ["S"])]
    nodes = [helper.make_node("Gather", ["table", "ids"], ["found"])]
    graph = helper.make_graph(nodes, "gather", inputs, [value("found", TensorProto.FLOAT, ["S"])])
    save(graph, tmp_path / "gather.onnx")
    session = open_backend("cpu", threads=1).open(tmp_path / "gather.onnx")
    table = np.arange(4, dtype=np.float32)
    with pytest.raises(BackendError, match=r"failed in a pass: .*Gather.*idx=4") as caught:
        session.run({"table": table, "ids": np.array([4])}, ["found"])
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    found = session.run({"table": table, "ids": np.array([3])}, ["found"])
    assert found["found"].numpy().tolist() == [3]
    session.close()


def test_kept_buffers_are_bounded(session: OrtSession) -> None:
    """A server meets prompts of every length: what is kept for each must not grow for ever."""
    for n_rows in range(1, 2 * MAX_PLANS):
        result = session.run(feeds(n_rows), ["scaled"])["scaled"].numpy()
        assert result.shape == (n_rows, 2)
    assert len(session._plans) == MAX_PLANS
    assert (session.run(feeds(1), ["scaled"])["scaled"].numpy() == 2).all()


def test_closed_session_says_so(session: OrtSession) -> None:
    """Not an attribute error from inside, whether the shape was seen before or not."""
    session.run(feeds(3), ["scaled"])
    session.close()
    session.close()
    for n_rows in (3, 4):
        with pytest.raises(BackendError, match="closed"):
            session.run(feeds(n_rows), ["scaled"])


@pytest.mark.parametrize("by_hand", [True, False], ids=["closed", "collected"])
def test_outputs_outlive_their_session(graph: Path, by_hand: bool) -> None:
    """Outputs, bindings and engine must go in this order: onnxruntime 1.23.2 on Python 3.10 crashed otherwise."""
    backend = open_backend("cpu", threads=1)
    kept: list[Array] = []
    for factor in (2.0, 3.0, 4.0):
        session = backend.open(graph)
        session.bind("total", "total_out", backend.zeros((2,), "float32"))
        kept.append(session.run(feeds(factor=factor), ["scaled"])["scaled"].numpy())
        if by_hand:
            session.close()
        del session
        gc.collect()
    assert [array[0, 0] for array in kept] == [2, 3, 4]


def test_two_sessions_on_one_graph_may_run_at_once(graph: Path) -> None:
    """Calibration works on several questions: weights are there once, buffers are each one's own."""
    backend = open_backend("cpu", threads=1)
    totals = []

    def add_up(factor: int) -> None:
        session, total = backend.open(graph), backend.zeros((2,), "float32")
        session.bind("total", "total_out", total)
        for _ in range(200):
            assert (session.run(feeds(factor=factor), ["scaled"])["scaled"].numpy() == factor).all()
        totals.append(total.numpy()[0])
        session.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add_up, (2, 3)))
    assert totals == [600, 600]


def test_two_sessions_on_one_graph_share_no_buffer(graph: Path) -> None:
    """A target and a draft are open at once; so are two requests of a server."""
    backend = open_backend("cpu", threads=1)
    one, two = backend.open(graph), backend.open(graph)
    totals = []
    for session in (one, two):
        totals.append(backend.zeros((2,), "float32"))
        session.bind("total", "total_out", totals[-1])
    first = one.run(feeds(factor=2), ["scaled"])["scaled"].numpy()
    second = two.run(feeds(factor=3), ["scaled"])["scaled"].numpy()
    assert (first == 2).all() and (second == 3).all()
    one.close()
    two.run(feeds(), ["scaled"])
    assert [total.numpy()[0] for total in totals] == [3, 6]
    two.close()


@pytest.mark.parametrize("content", [b"", b"not a graph", None], ids=["empty", "broken", "missing"])
def test_unreadable_graph_is_one_line_that_names_it(
    tmp_path: Path, content: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime raises a dozen classes for these; nothing of its own may reach stdout or stderr either."""
    path = tmp_path / "broken.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BackendError, match=r"cannot open .*broken\.onnx: ") as caught:
        open_backend("cpu", threads=1).open(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_graph_with_an_unknown_operator_is_refused(tmp_path: Path, graph: Path) -> None:
    """A graph for a newer engine: the operator that is missing is named."""
    model = onnx.load(graph)
    model.graph.node[0].op_type = "Multiply"
    onnx.save(model, tmp_path / "newer.onnx")
    with pytest.raises(BackendError, match="Multiply"):
        open_backend("cpu", threads=1).open(tmp_path / "newer.onnx")


def test_unknown_backend_lists_the_known() -> None:
    """A typo is mended from the message alone."""
    with pytest.raises(ConfigError, match=f"one of {', '.join(BACKENDS)}, got 'gpu'"):
        open_backend("gpu")


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads: int) -> None:
    """0 means "all" to the engine and nothing to a person."""
    with pytest.raises(ConfigError, match="threads must be at least 1"):
        open_backend("cpu", threads=threads)


def test_cuda_without_cuda_is_an_error_and_never_the_cpu() -> None:
    """D46: a provider that is missing must not be replaced in silence; the message says what is there."""
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build of onnxruntime has CUDA")
    with pytest.raises(BackendError, match=r"CUDAExecutionProvider.*CPUExecutionProvider.*semspec\[gpu\]"):
        open_backend("cuda")


def test_cuda_without_a_device_is_told_before_a_graph_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """D46: a build with CUDA on a machine without a GPU, which `auto` must find out before it chooses."""
    import onnxruntime

    from semspec.runtime.backends import ort

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build of onnxruntime has CUDA")
    monkeypatch.setitem(ort.PROVIDERS, "cuda", "CPUExecutionProvider")  # as if the build had it
    with pytest.raises(
        BackendError, match=r"backend 'cuda' finds no device that it can use \(.*use backend 'cpu'"
    ) as e:
        open_backend("cuda")
    assert "\n" not in str(e.value)


def test_provider_that_cannot_start_is_an_error_and_never_the_cpu(
    graph: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """D46: left to itself onnxruntime prints a notice and goes on with the CPU when a provider does not start."""
    from semspec.runtime.backends import ort

    monkeypatch.setitem(ort.PROVIDERS, "cpu", "CUDAExecutionProvider")
    backend = ort.OrtBackend("cpu", 1, False)  # as if the build had CUDA, and the machine had not
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(BackendError, match="CUDA"):
        backend.open(graph)
    assert "Falling back" not in capfd.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind processes to cores this way")
def test_process_bound_to_one_core_gets_one_thread(graph: Path) -> None:
    """D46: in a container or under taskset a thread for each core of the machine halved the speed (measured)."""
    code = (
        "import os, sys; from pathlib import Path; from semspec.runtime.backends import open_backend\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "backend, before = open_backend('cpu'), len(os.listdir('/proc/self/task'))\n"
        "session = backend.open(Path(sys.argv[1]))\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, graph], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_missing_onnxruntime_gives_the_command_that_installs_it() -> None:
    """The runtime itself needs no engine to be imported; the first use of one says what to do."""
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from semspec.runtime.backends import open_backend\n"
        "from semspec.runtime.errors import BackendError\n"
        "try: open_backend('cpu')\n"
        "except BackendError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'semspec[cpu]'" in done.stdout
    assert done.stdout.count("\n") == 1


def test_new_rows_are_stored_into_the_parts_of_one_buffer() -> None:
    """What `primitive` graphs leave to the runtime: every layer's rows at once, behind those that are there."""
    backend = OrtBackend("cpu", 1, False)
    buffer = backend.zeros((4, 1, 2, 6, 3), "float16")
    parts = [backend.part(buffer, index) for index in range(4)]
    rows = np.arange(4 * 2 * 2 * 3, dtype=np.float16).reshape(4, 1, 2, 2, 3)
    backend.store(OrtTensor(rows), buffer, 3)
    for index, part in enumerate(parts):
        assert np.shares_memory(part.numpy(), buffer.numpy())
        assert np.array_equal(part.numpy()[:, :, 3:5], rows[index])
        assert not part.numpy()[:, :, :3].any() and not part.numpy()[:, :, 5:].any()
