"""The command line: `goldsmith verify | diagnose | gate | new | bench | finetune | generate | serve | merge | adapter`.

Typer, rich and jinja2 are imported when `app` is first used, because other code imports `goldsmith.cli.targets`, which
needs torch but none of these.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .main import Program

__all__ = ["app"]

NEEDED = ("typer", "click", "rich", "jinja2", "markupsafe")


def __getattr__(name: str) -> Program:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .adapter import options as adapter
        from .bench import moved
        from .bench import options as bench
        from .finetune import options as finetune
        from .gate import options as gate
        from .generate import options as generate
        from .main import app
        from .merge import options as merge
        from .serve import options as serve

        for each in (gate, bench, finetune, generate, serve, merge, adapter, moved):
            each.register(app)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        sys.stderr.write(f"goldsmith's commands need the package {package}, which is not installed here: ")
        sys.stderr.write(f"pip install {package}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # nothing can be lost yet; a running command handles its own Ctrl-C
        raise SystemExit(130) from None
    return app
