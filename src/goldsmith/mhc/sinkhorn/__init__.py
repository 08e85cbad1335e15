"""mhc.sinkhorn: the projection of logits towards doubly stochastic matrices."""
