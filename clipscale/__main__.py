"""`python -m clipscale`: the same as the `clipscale` command."""

from clipscale.cli import main

if __name__ == "__main__":
    main()
