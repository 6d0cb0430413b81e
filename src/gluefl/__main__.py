"""`python -m gluefl` is the program `gluefl`."""

from gluefl.cli import main

if __name__ == "__main__":
    main()
