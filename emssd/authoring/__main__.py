"""Lets ``python -m emssd.authoring`` run."""

from emssd.authoring import main

if __name__ == "__main__":
    main()
