"""Where the test environments keep Transformer Engine: in their folder `te`, and not in site-packages.

Its wheel holds the Python alone. Without the compiled part `import transformer_engine` raises a RuntimeError ("Found
empty `transformer-engine` meta package"), which megatron-core does not expect: from site-packages it would break every
import of megatron.core, in the tests and in the quick start. So only tests/te, which emulate that part, see it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(sys.prefix) / "te"  # as in scripts/te_emulation.py, which imports torch
_TESTS = Path(__file__).parent / "te"


@contextmanager
def visible(test: Path) -> Iterator[None]:
    """While it lasts, and if `test` lies in tests/te: Transformer Engine can be found, here and by new processes."""
    if not FOLDER.is_dir() or not test.is_relative_to(_TESTS):
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), before]))
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
