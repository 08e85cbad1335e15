"""Three ways into goldsmith: how `goldsmith --help` groups the commands, and where each begins."""

from __future__ import annotations

DOORS = {
    "Check my kernel": ("new", "verify", "diagnose", "replay", "gate"),
    "Train or run a mixture-of-experts model": ("finetune", "generate", "serve", "merge", "adapter"),
    "Use the operators": ("doctor", "bench"),
}
BEGIN = (
    ("goldsmith new NAME", "then goldsmith verify NAME.py: a first kernel of your own"),
    ("goldsmith generate MODEL", "--prompt TEXT: text from a model"),
    ("goldsmith doctor", "and in Python: from goldsmith import mhc, router, experts"),
)
