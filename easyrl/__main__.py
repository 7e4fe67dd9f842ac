"""`python -m easyrl`: the same as `easyrl`."""

from easyrl_train import main

if __name__ == "__main__":  # worker processes import this file anew
    main()
