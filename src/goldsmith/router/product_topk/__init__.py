"""router.product_topk: the k pairs of two short logit vectors with the largest sums."""
