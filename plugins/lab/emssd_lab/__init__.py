"""The lab: experiments, reports of their rows, the simulator of a step's costs, and drafts that are replayed."""
