"""Right kernels drawn at random: whatever the assay finds in one is a false alarm."""
