"""Running a candidate: memory guards, torch's state, hooks, and Triton's interpreter."""
