"""Reading and writing checkpoints; one file for each on-disk format."""
