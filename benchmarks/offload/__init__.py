"""`python -m benchmarks.offload`: experts split over CPU and GPU at the sizes of real layers, beside their peers."""
