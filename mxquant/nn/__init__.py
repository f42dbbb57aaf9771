"""Layers whose weights stay packed."""
