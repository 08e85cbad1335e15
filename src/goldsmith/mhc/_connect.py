"""The path under which 0.1 pickled the settings of a connection, so that modules saved by it still load."""

from ._connection import ConnectionSettings as Settings

__all__ = ["Settings"]
