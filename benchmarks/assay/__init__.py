"""How often the assay is wrong: right and wrong kernels, and what watching a training run costs."""
