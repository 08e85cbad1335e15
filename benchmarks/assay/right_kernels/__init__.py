"""Right kernels drawn at random: any finding on one is a false alarm."""
