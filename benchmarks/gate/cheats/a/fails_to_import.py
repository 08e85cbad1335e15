"""Imports a module that does not exist."""

PROBLEM = "a_linear"
STATUS = "refused"


def _module():
    import a_module_that_nobody_wrote

    return a_module_that_nobody_wrote


candidate = _module().candidate
