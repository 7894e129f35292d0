"""A run's events, and their outputs. A failure here never stops training."""
