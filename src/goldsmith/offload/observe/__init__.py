"""What the lanes did: counters, traces, and the load that other programs put on the processors."""
