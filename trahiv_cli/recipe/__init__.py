"""Recipes: the settings of a run. No module here imports torch or uses the network."""
