"""Lets ``python -m emssd_testing.authoring`` run."""

from emssd_testing.authoring import main

if __name__ == "__main__":
    main()
