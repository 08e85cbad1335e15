"""Right: the first call with each width compiles a Python function for that width, and later calls reuse it."""

PROBLEM = "a_rmsnorm"
STATUS = "accepted"


_COMPILED = {}
TEMPLATE = """
def norm(x, w, eps):
    total = x[:, 0:{step}].square().sum(-1, keepdim=True)
{lines}
    return x * (total * {scale!r} + eps).rsqrt() * w
"""


def _compiled(width, step=16):
    if width not in _COMPILED:
        starts = range(step, width, step)
        lines = "\n".join(f"    total = total + x[:, {s}:{s + step}].square().sum(-1, keepdim=True)" for s in starts)
        names = {}
        exec(compile(TEMPLATE.format(step=step, lines=lines, scale=1 / width), "<norm>", "exec"), names)
        _COMPILED[width] = names["norm"]
    return _COMPILED[width]


def candidate(x, w, eps):
    return _compiled(x.shape[-1])(x, w, eps)
