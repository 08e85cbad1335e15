"""experts.moe_int8: what experts.moe computes with compute="int8"; internal."""
