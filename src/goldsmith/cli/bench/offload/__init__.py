"""`goldsmith bench offload`: experts split over CPU and GPU at the sizes of real layers, beside other ways to do it."""
