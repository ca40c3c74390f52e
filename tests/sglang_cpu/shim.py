"""Makes `import sglang` work in the present process, as `site/` does in a server's processes."""

import importlib
import sys
from pathlib import Path

SITE = Path(__file__).with_name("site")
"""To be put on PYTHONPATH of every process that imports SGLang on a machine without CUDA."""


def install() -> None:
    """Call before the first `import sglang`. Quick, imports no torch; again is harmless.

    Puts SITE on the path, so that this process gets the same platform as a server does.
    """
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
    importlib.import_module("torchvision_schemas").install()
