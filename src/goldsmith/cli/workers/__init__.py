"""Worker processes of `goldsmith verify` and `goldsmith diagnose`: the pool, the child's main loop, its messages."""
