"""`python -m dmfs` is `dmfs`."""

from dmfs.cli.main import main

if __name__ == "__main__":
    main()
