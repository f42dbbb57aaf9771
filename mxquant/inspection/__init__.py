"""Checkpoints of any packed format, looked at: what is in them, and whether it is all right."""
