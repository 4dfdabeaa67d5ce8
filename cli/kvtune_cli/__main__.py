"""`python -m kvtune_cli`: the same as the `kvtune` script."""

from kvtune_cli.main import run

if __name__ == "__main__":
    run()
