"""The engines in Python, each in a process of its own: `python -m benchmarks.generate.workers.worker`."""
