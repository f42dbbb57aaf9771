"""Number formats, schemes and recipes, as data; no torch."""
