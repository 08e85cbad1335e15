"""apply: the hyper-connections of a transformers model, computed with goldsmith.mhc."""
