"""Which lane computes which expert: costs, the scheduler, the assignment of a call."""
