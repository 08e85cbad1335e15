"""`python -m goldsmith.cli`: the same as the `goldsmith` command."""

import runpy

runpy.run_module("goldsmith", run_name="__main__")
