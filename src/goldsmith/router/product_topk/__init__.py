"""router.product_topk: the k best pairs of two short logit vectors."""
