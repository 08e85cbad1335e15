"""The command line: `goldsmith verify | bench | doctor`."""

from .main import app

__all__ = ["app"]
