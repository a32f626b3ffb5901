"""The command line: Hydra composes the options, and these modules say what went wrong with them."""
