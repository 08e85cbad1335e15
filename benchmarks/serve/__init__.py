"""`python -m benchmarks.serve`: tokens per second of servers at 1, 4 and 16 clients."""
