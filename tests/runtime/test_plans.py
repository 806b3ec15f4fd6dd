"""Plans as they lie in a bundle, and everything that makes one unusable, told before an engine reads it (D38).

No engine is needed: a plan is a file with a record beside it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from semspec.runtime.bundle import Bundle, sha256_of
from semspec.runtime.errors import BackendError, BundleError
from semspec.runtime.plans import (
    FORMAT,
    PLANS_FILE,
    PlanFile,
    PlanSet,
    build_command,
    find_plan,
    plan_folder_name,
    read_plan_sets,
)

RTX = {"engine": "tensorrt-rtx", "version": "1.7.1.116"}


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """A bundle of one's own; its CPU graph stands for the graph that plans are made of."""
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    return Bundle.open(tmp_path / "bundle")


def add_plan(bundle: Bundle, *capabilities: str, content: bytes = b"a plan", **changes: Any) -> Path:
    """Write a folder with one plan `native`; changes: of its PlanFile, or of the set."""
    own: dict[str, Any] = {**RTX, "format": FORMAT, "capabilities": capabilities or ("8.6",), "device": ""}
    folder = (
        bundle.path
        / "target"
        / "plans"
        / plan_folder_name(own["engine"], own["version"], own["capabilities"])
    )
    folder.mkdir(parents=True)
    (folder / "native.plan").write_bytes(content)
    name = "target/onnx/cpu.onnx"
    plan: dict[str, Any] = {
        "file": "native.plan",
        "sources": {name: bundle.manifest.files[name].sha256},
        "precision": "fp16",
        "profiles": {"decode": {"S": (1, 1, 2)}},
        "key": "0" * 64,
        "size": len(content),
        "sha256": sha256_of(folder / "native.plan"),
    }
    plan |= {key: value for key, value in changes.items() if key in plan}
    own |= {key: value for key, value in changes.items() if key in own}
    found = PlanSet(**own, plans={"native": PlanFile(**plan)})
    (folder / PLANS_FILE).write_text(found.to_json(), encoding="utf-8")
    return folder


def found(bundle: Bundle, capability: str = "8.6", **changes: Any) -> Path:
    given = {**RTX, **changes}
    return find_plan(bundle, "target", "native", capability=capability, verify=True, **given)[0]


def test_plan_is_found_by_engine_release_and_device(bundle: Bundle) -> None:
    """Of several that fit, the one for the fewest devices: it was made for this one."""
    many, one = add_plan(bundle, "8.6", "8.9", "12.0"), add_plan(bundle, "8.9")
    assert found(bundle, "8.9") == one / "native.plan"
    assert found(bundle, "12.0") == many / "native.plan"


@pytest.mark.parametrize(
    ("capability", "changes"),
    [
        ("8.9", {}),
        ("8.6", {"version": "1.6.1.120"}),
        ("8.6", {"engine": "tensorrt", "version": "11.4.0.106"}),
    ],
)
def test_another_device_release_or_engine_is_refused(
    bundle: Bundle, capability: str, changes: dict[str, str]
) -> None:
    """What was found, what is needed, and the command: not a tag that does not match, from inside an engine."""
    add_plan(bundle, "8.6")
    with pytest.raises(BackendError) as caught:
        found(bundle, capability, **changes)
    message = str(caught.value)
    assert "it has native for tensorrt-rtx 1.7.1.116 on 8.6" in message
    wanted = {**RTX, **changes}
    assert f"for {wanted['engine']} {wanted['version']} on compute capability {capability}" in message
    assert message.endswith(build_command(bundle.path, wanted["engine"], capability))


def test_bundle_without_plans_names_the_command(bundle: Bundle) -> None:
    """The CPU graph still works; asking for an engine is an error, never a silent change."""
    with pytest.raises(BackendError, match=r"it has none: build it with: semspec build .* --sm 86"):
        found(bundle)


@pytest.mark.parametrize("content", [b"", b"a pla", b"a text file named .plan"])
def test_empty_truncated_or_other_file_is_refused(bundle: Bundle, content: bytes) -> None:
    """By its size, before an engine speaks of assertions."""
    folder = add_plan(bundle)
    (folder / "native.plan").write_bytes(content)
    with pytest.raises(
        BundleError, match=rf"has {len(content)} bytes, 6 expected; copy the whole bundle, or remove"
    ) as caught:
        found(bundle)
    assert str(caught.value).endswith(
        f"build again: semspec build {bundle.path} --backend tensorrt-rtx --sm 86"
    )


def test_changed_and_missing_files_are_refused(bundle: Bundle) -> None:
    """One of equal size is told by its hash, on request."""
    folder = add_plan(bundle)
    (folder / "native.plan").write_bytes(b"A plan")
    assert find_plan(bundle, "target", "native", capability="8.6", **RTX)[0].is_file()
    with pytest.raises(BundleError, match="was changed: sha256"):
        found(bundle)
    (folder / "native.plan").unlink()
    with pytest.raises(BundleError, match="is missing: 6 bytes expected"):
        found(bundle)


def test_plan_of_other_weights_is_refused(bundle: Bundle) -> None:
    """A bundle that was exported again under its old plans would answer with the old model."""
    name = "target/onnx/cpu.onnx"
    add_plan(bundle, sources={name: "1" * 64})
    with pytest.raises(BundleError, match=f"was compiled from another '{name}': sha256 {'1' * 64}") as caught:
        found(bundle)
    assert str(caught.value).endswith(
        f"here '{bundle.manifest.files[name].sha256}'; build again: "
        f"semspec build {bundle.path} --backend tensorrt-rtx --sm 86"
    )


def test_plan_of_a_graph_that_is_gone_is_refused(bundle: Bundle) -> None:
    """Probes are replaced; what was compiled from the old ones must not answer for the new."""
    add_plan(bundle, sources={"probes/1/target.onnx": "1" * 64})
    with pytest.raises(BundleError, match=r"another 'probes/1/target.onnx': .* here 'none'"):
        found(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this semspec reads 1"),
        ({"engine": "openvino"}, "engine must be one of tensorrt, tensorrt-rtx"),
        ({"capabilities": []}, "capabilities must be such as 8.6"),
        ({"capabilities": ["sm86"]}, "capabilities must be such as 8.6"),
        ({"plans": {}}, "there must be a plan at least"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_damaged_records_are_refused(bundle: Bundle, change: dict[str, Any], message: str) -> None:
    """A stranger's record is held against what it must be; none is passed over."""
    file = add_plan(bundle) / PLANS_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(BundleError, match=f"plans.json is damaged .*{message}"):
        read_plan_sets(bundle, "target")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_records_that_are_no_records_are_refused(bundle: Bundle, text: str) -> None:
    """Half-written, or another program's."""
    (add_plan(bundle) / PLANS_FILE).write_text(text)
    with pytest.raises(BundleError, match=r"plans\.json is damaged"):
        read_plan_sets(bundle, "target")


@pytest.mark.parametrize("file", ["../native.plan", "/etc/passwd", "a/b.plan", "native.so", ""])
def test_plan_outside_its_folder_is_refused(bundle: Bundle, file: str) -> None:
    """An engine must not be led to a file that is none of the bundle's."""
    record = add_plan(bundle) / PLANS_FILE
    content = json.loads(record.read_text())
    content["plans"]["native"]["file"] = file
    record.write_text(json.dumps(content))
    with pytest.raises(BundleError, match="a plan's file must be a plain name"):
        found(bundle)


def test_link_out_of_the_bundle_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """A plain name may still be a link to anywhere."""
    plan = add_plan(bundle) / "native.plan"
    plan.rename(tmp_path / "elsewhere")
    plan.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="is a link that leads out of the bundle"):
        found(bundle)


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1, 3], [0, 1, 1], [1, 1, 1, 1]])
def test_sizes_that_do_not_ascend_are_refused(bundle: Bundle, sizes: list[int]) -> None:
    """The runtime cuts its calls by them (D39)."""
    with pytest.raises(ValueError, match="sizes of 'S' must ascend from 1"):
        add_plan(bundle, profiles={"decode": {"S": tuple(sizes)}})


def test_folder_being_written_is_not_looked_at(bundle: Bundle) -> None:
    """Another run may be building at this moment."""
    (bundle.path / "target" / "plans" / ".tensorrt-rtx-1-sm86.partial").mkdir(parents=True)
    assert read_plan_sets(bundle, "target") == {}
