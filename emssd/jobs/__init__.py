"""A run of the command line, from its options to the files it writes."""
