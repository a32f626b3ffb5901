"""Makes the weights of the demo anew."""
