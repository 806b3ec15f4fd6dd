"""Every name of TensorRT's Python module that the code uses exists in every release that it is for.

The tables in ../trt_api were recorded by importing the releases themselves (record.py there).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from rtx import library, needs_rtx

import semspec.export.engines
import semspec.runtime.backends
from semspec.export.engines.compiler import BITS, DTYPES, PRECISIONS

EXPORT = Path(str(semspec.export.engines.__file__)).parent
RUNTIME = Path(str(semspec.runtime.backends.__file__)).parent
TABLES = sorted((Path(__file__).parents[1] / "trt_api").glob("*.json"))

# what a variable of the exporter's files, and of the runtime's, holds -> the class of it
RUNTIME_CLASSES = {
    "config": "IRuntimeConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "runtime": "Runtime",
}
CLASSES = {
    "attention": "IAttention",
    "builder": "Builder",
    "cache": "ITimingCache",
    "config": "IBuilderConfig",
    "fault": "ParserError",
    "layer": "ILayer",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "plan": "IHostMemory",
    "profile": "IOptimizationProfile",
    "tensor": "ITensor",
}
# used behind `engine` only, and where the module has CudaGraphStrategy
RTX_ONLY = {
    "CudaGraphStrategy",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "ComputeCapability",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.set_runtime_cache",
}
# used for TensorRT-RTX alone, and not in the oldest TensorRT
RTX_AND_LATER = {
    "ICudaEngine.create_runtime_config",
    "IRuntimeConfig.set_execution_context_allocation_strategy",
}
# used for layers only that the parsers before 10.15 do not make
NATIVE_ONLY = {
    "IAttentionInputLayer",
    "IAttentionInputLayer.attention",
    "IAttention.decomposable",
    "IAttention.mask",
}
FILES = {EXPORT / name: CLASSES for name in ("compiler.py", "library.py", "listening.py")}
FILES |= {RUNTIME / name: RUNTIME_CLASSES for name in ("trt.py", "passes.py")}
OLD = ("tensorrt-10.3.0", "tensorrt-10.13.3.9")


def used() -> set[str]:
    """`Class.attribute`, and `Class` of the module, of all that the files name."""
    found = set()
    for file, classes in FILES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                continue
            owner = node.value
            if isinstance(owner, ast.Attribute) and ast.unparse(owner.value).split(".")[-1] == "trt":
                found.add(f"{owner.attr}.{node.attr}")
            if ast.unparse(owner).split(".")[-1] == "trt":
                found.add(node.attr)
            variable = ast.unparse(owner).removeprefix("self._")
            if variable in classes:
                name = "IAttentionInputLayer" if node.attr == "attention" else classes[variable]
                found.add(f"{name}.{node.attr}")
    return found


def names(table: Path) -> set[str]:
    classes = json.loads(table.read_text(encoding="utf-8"))["classes"]
    return {f"{name}.{attribute}" for name, text in classes.items() for attribute in text.split()} | set(
        classes
    )


def test_names_are_found() -> None:
    """An empty list would be in every table; these are sure to be used."""
    assert {
        "Builder.create_network",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "OnnxParser.parse_from_file",
        "IAttention.mask",
        "ITensor.dtype",
        "ParserError.desc",
        "Runtime.deserialize_cuda_engine",
        "IExecutionContext.execute_async_v3",
        "ICudaEngine.device_memory_size_v2",
        "ExecutionContextAllocationStrategy.USER_MANAGED",
    } <= used()
    assert used() >= RTX_ONLY | RTX_AND_LATER | NATIVE_ONLY


def test_releases_are_those_we_promise() -> None:
    """10.3 to 11.4, and TensorRT-RTX."""
    promised = {"tensorrt-10.3.0", "tensorrt-10.13.3.9", "tensorrt-10.16.1.11", "tensorrt-11.4.0.106"}
    assert {table.stem for table in TABLES} == promised | {"tensorrt-rtx-1.7.1.116"}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_every_name_used_is_in_the_release(table: Path) -> None:
    """11 took away what 10 had, and 10.3 lacks what came later: no attribute is found missing on a device."""
    missing = used() - names(table)
    expected = set() if "rtx" in table.stem else set(RTX_ONLY)
    expected |= NATIVE_ONLY if table.stem in OLD else set()
    expected |= RTX_AND_LATER if table.stem == OLD[0] else set()
    assert missing == expected


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_layers_and_types_have_the_names_we_compare(table: Path) -> None:
    """Layers and types are told by their names, which a newer release may change."""
    known = names(table)
    layers = {"CONSTANT"} if table.stem in OLD else {"CONSTANT", "ATTENTION_INPUT", "KV_CACHE_UPDATE"}
    assert {f"LayerType.{name}" for name in layers} <= known
    new = {"FP4", "E8M0"} if table.stem == "tensorrt-10.3.0" else set()
    assert {f"DataType.{name}" for name in {*BITS, *DTYPES, *PRECISIONS} - new} <= known
    assert {f"Severity.{name}" for name in ("INTERNAL_ERROR", "ERROR", "WARNING")} <= {
        name.replace("ILogger.", "Severity.") for name in known
    }


@needs_rtx
def test_table_of_the_installed_release_is_true() -> None:
    """A table that drifts from the release it is of proves nothing."""
    found = library()
    table = next(path for path in TABLES if path.stem == f"{found.engine}-{found.version}")
    for name in names(table):
        owner, _, attribute = name.partition(".")
        assert hasattr(getattr(found.trt, owner), attribute) if attribute else hasattr(found.trt, owner), name


def test_exporter_and_runtime_read_the_same_types() -> None:
    """Each has its own table: the exporter must not need the runtime's driver."""
    tables = [
        node
        for node in ast.parse((RUNTIME / "trt.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
    ]
    (table,) = [node.value for node in tables if ast.unparse(node.targets[0]) == "DTYPES"]
    assert ast.literal_eval(table) == DTYPES
