"""Other front doors: `emssd.custom_generate` for Transformers."""
