"""Lets ``python -m emssd.testing.authoring`` run."""

from emssd.testing.authoring import main

if __name__ == "__main__":
    main()
