"""Measuring models: perplexity, divergence from a baseline, downstream tasks, reports and plots."""
