"""`python -m specengine`: the same program as the `specengine` command."""

from specengine.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
