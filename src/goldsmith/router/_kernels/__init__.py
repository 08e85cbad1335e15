"""Triton kernels of the family.

product_topk runs `bounded_selection` for k <= 64. For larger k it runs `warp_selection` on 16-bit logits and
`row_selection` on float32; `scatter` is its backward. atomic_experts runs `table_lookups` and `table_gradients`, or
`dense_products` for the dense strategy.

Legend: T tokens or rows, K experts of each, P = T * K pairs, N experts, D and E the widths of the tables, SX and SY
logits per axis. A trailing P (K_P) means padded to a power of two. A `place` is an index into an axis, a `rank` its
place in sorted order.
"""
