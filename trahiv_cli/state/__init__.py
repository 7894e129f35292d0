"""The state that a joiner gets, as snapshots that several peers give."""
