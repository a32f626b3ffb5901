"""Lets ``python -m emssd.plugins`` run."""

from emssd.plugins import main

if __name__ == "__main__":
    main()
