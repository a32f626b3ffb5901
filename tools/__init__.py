"""Programs that make what the checkout holds; no part of the installed package."""
