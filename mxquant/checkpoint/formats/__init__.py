"""On-disk formats of packed weights, one file for each."""
