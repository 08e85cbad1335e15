"""Memory and streams of a device: the budget, slots for experts, the cache, pinned buffers, copies."""
