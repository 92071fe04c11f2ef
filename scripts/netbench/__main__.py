import sys

from .command import main

if __name__ == "__main__":  # and not in the processes that multiprocessing starts
    sys.exit(main())
