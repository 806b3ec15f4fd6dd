"""Record the public names of an engine's Python module: python record.py MODULE ENGINE VERSION > FILE.

MODULE is tensorrt_rtx, or tensorrt_bindings.tensorrt of a wheel unpacked onto PYTHONPATH. The latter needs no engine:
three shared libraries under the names that it looks for (libnvinfer, libnvonnxparser, libnvinfer_plugin), with
functions of those names that are missing which do nothing, are enough for importing it, and for nothing else.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

module, engine, version = sys.argv[1:]
names = {name: getattr(import_module(module), name) for name in dir(import_module(module)) if name[0] != "_"}
classes = {
    name: " ".join(sorted(attribute for attribute in dir(value) if attribute[0] != "_"))
    for name, value in sorted(names.items())
    if isinstance(value, type)
}
json.dump({"engine": engine, "version": version, "classes": classes}, sys.stdout, indent=1)
sys.stdout.write("\n")
