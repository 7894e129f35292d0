"""What a joiner gets: weights and optimizer state, as snapshots that several peers give."""
