"""`goldsmith serve`: an OpenAI-compatible server on a model whose experts are split over CPU and GPU."""
