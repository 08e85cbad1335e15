"""Running a candidate: guard bands, torch's state, hooks, and Triton's interpreter."""
