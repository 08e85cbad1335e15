"""experts.moe_int8: the internal operator of experts.moe with compute="int8"."""
