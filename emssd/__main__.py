"""Lets ``python -m emssd`` run."""

from emssd.cli import main

if __name__ == "__main__":
    main()
