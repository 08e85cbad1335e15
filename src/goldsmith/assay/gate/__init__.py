"""The gate: kernels that nobody trusts, judged in isolation.

Problem      what is to be computed: a golden and cases
Candidate    the source of a kernel
judge        one candidate against one problem -> Verdict
judge_all    many
Judges       many, in several processes that load the problem themselves
reward       verdicts as a reward function for trainers
load_problem, load_candidates   from files in the formats that people have
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bad_problem import BadProblem
    from .candidate import Candidate
    from .formats.candidate_source import NoCandidates, load_candidates
    from .formats.problem_source import ProblemSource, load_problem
    from .isolation.limits import Limits
    from .judges import Judges
    from .judging import GateOptions, judge, judge_all
    from .kernel_reward import Reward, reward
    from .problem import Problem
    from .verdict import Verdict

_MODULE_OF = {
    "BadProblem": ".bad_problem",
    "Candidate": ".candidate",
    "Judges": ".judges",
    "NoCandidates": ".formats.candidate_source",
    "ProblemSource": ".formats.problem_source",
    "Reward": ".kernel_reward",
    "load_candidates": ".formats.candidate_source",
    "load_problem": ".formats.problem_source",
    "reward": ".kernel_reward",
    "Limits": ".isolation.limits",
    "GateOptions": ".judging",
    "Problem": ".problem",
    "Verdict": ".verdict",
    "judge": ".judging",
    "judge_all": ".judging",
}
__all__ = [
    "BadProblem", "Candidate", "GateOptions", "Judges", "Limits", "NoCandidates", "Problem", "ProblemSource", "Reward",
    "Verdict", "judge", "judge_all", "load_candidates", "load_problem", "reward",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
