"""A run's folder and its user: which process owns the folder, and what the user requests of its peer."""
