"""Training by several recipes, compared: texts, models, the study, its tables and pictures."""
