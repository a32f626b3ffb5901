"""Hydra heads (Ankner et al. 2024, arXiv 2402.05109): their files and published tree; nothing drafts with them yet."""
