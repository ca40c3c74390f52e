"""Lets torchvision be imported beside a torch without CUDA.

The compiled part of the published torchvision is linked against CUDA, so beside a CPU torch it does
not load. `import torchvision` then fails where it describes operators that the compiled part was to
declare. SGLang and transformers import torchvision whatever the model, but call none of those.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "torchvision"
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# torch forgets a library's operators when the library object goes.
_libraries: list[Any] = []


def install() -> None:
    """Be ready for the first import of torchvision in this process. Imports nothing itself."""
    waiting = any(isinstance(finder, _SchemasFirst) for finder in sys.meta_path)
    if _PACKAGE not in sys.modules and not waiting and not _libraries:
        sys.meta_path.insert(0, _SchemasFirst())


class _SchemasFirst(importlib.abc.MetaPathFinder):
    """Finds no module: declares the operators just before torchvision is looked for."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> None:
        if fullname == _PACKAGE:
            sys.meta_path.remove(self)
            _declare_missing()


def _declare_missing() -> None:
    import torch  # torchvision is about to import it in any case

    if _compiled_part_loads(torch):
        return
    library = torch.library.Library(_PACKAGE, "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _compiled_part_loads(torch: Any) -> bool:
    """Whether torchvision's own operators are there; declaring them twice would be an error."""
    spec = importlib.machinery.PathFinder.find_spec(_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    for compiled in (file for folder in folders for file in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(compiled)
        except OSError:
            return False
        return True
    return False
