"""The old place of `emssd.draft_models` and `emssd_heads`."""

raise ImportError("emssd.drafters is gone: see emssd.draft_models, and emssd_heads for trained heads")
