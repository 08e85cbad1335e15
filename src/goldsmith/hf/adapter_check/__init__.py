"""Whether an adapter arrives in other runtimes: the same tokens through each of them, against the trained model."""
