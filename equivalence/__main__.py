"""`python -m equivalence` is the console script."""

from equivalence.cli import main

if __name__ == "__main__":
    main()
