"""Memory and time of experts.moe on a CPU, compared with the rates that the processor reaches."""
