"""``python -m clearhead``: the command line, where its script is not on the path."""

from clearhead.cli.app import main

if __name__ == "__main__":
    main()
