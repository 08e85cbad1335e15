"""Changes of reductions: softmax, prefix sums, scattered sums."""
