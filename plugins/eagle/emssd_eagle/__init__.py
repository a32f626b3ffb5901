"""EAGLE-1 and EAGLE-2 heads (Li et al. 2024, arXiv 2401.15077 and 2406.16858): their files; nothing drafts yet."""
