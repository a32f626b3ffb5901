"""A module that runs on packed rows: the target, and its copies and parts that draft."""
