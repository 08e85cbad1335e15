"""mhc.sinkhorn: turns n x n logits into (nearly) doubly stochastic matrices."""
