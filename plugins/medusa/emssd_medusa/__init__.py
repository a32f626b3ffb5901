"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): their files and published trees; nothing drafts with them yet."""
