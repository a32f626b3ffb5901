"""An attack on emssd from outside, with an oracle and drafters of its own: `nox -s attack`."""
