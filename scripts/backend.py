"""The build backend: scikit-build-core, which also builds the native library for an editable install.

pip and uv call these functions (pyproject.toml names this file). An editable install runs the checkout's own files, so
its library is the one that scripts/native.py builds in the checkout. Where `make` builds it at the same time, this
backend does not wait for it, because pip installs no package before its answer. Without a compiler the install
succeeds; goldsmith then warns when it would have used the library.
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scikit_build_core.build import build_editable as _build_editable
from scikit_build_core.build import (
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import get_requires_for_build_editable as _get_requires_for_build_editable

import native

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, object] | None


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    tools = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None] if native.supported() else []
    return [*_get_requires_for_build_editable(config_settings), *tools]


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    if native.supported() and not native.under_way():
        try:
            native.build()
        except native.Failed as error:
            print(f"goldsmith: {error} Until then goldsmith runs without its native library.", file=sys.stderr)
    return _build_editable(wheel_directory, config_settings, metadata_directory)
