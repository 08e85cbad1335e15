"""From a failing case to its cause: evidence, the stage that goes wrong first, and what kind of mistake makes it.

Imports torch and the assay alone.
"""
