"""`python -m memserver`: the same as `smb-memserver`."""

from memserver.cli import main

if __name__ == "__main__":
    main()
