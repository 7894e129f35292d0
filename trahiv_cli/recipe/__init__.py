"""What a run is. Knows no torch and no network."""
