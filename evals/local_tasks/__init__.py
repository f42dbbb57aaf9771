"""lm-eval tasks whose data are a JSONL file that the user has."""
