"""What all commands print to, and how they end."""
