"""Changes of the backward alone: what it recomputes, sums of ranks, sums along another axis, single readers."""
