"""Memory and time of experts.moe beside what the processor reaches."""
