"""Models and tokenizers from folders, hub ids and shapes: `loading` makes a target of what `checkpoint` reads."""
