"""`python -m fourfold`: the command line, for torchrun and for a checkout without the installed script."""

from fourfold.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
