"""Formats of problems and candidates.

problems     own files (golden and cases), KernelBench, FlashInfer-Bench's Definition and Workload
candidates   Python, Triton, CUDA C++ and C++ files, JSON lines, FlashInfer-Bench's Solution
"""

from __future__ import annotations
