"""Models and tokenizers from folders, hub ids and shapes."""
