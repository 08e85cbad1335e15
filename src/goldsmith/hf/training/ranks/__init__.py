"""Several processes that train one model: how they join, exchange, and notice that one of them has ended."""
