"""The golden on one case's inputs: its own checks, its values, and where its gradient is not unique."""
