"""`goldsmith generate`: text from a mixture-of-experts model whose experts are split over CPU and GPU."""
