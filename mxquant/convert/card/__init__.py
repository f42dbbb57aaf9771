"""The model card of an output. Imports neither torch nor the hub's library."""
