"""Saves all models of a run together, and gives a run back what was saved."""
