"""A Hugging Face module as it is: its attention, masks, states and arithmetic, and what probing it shows."""
