"""The command line."""

from moepack.boundary import run
from moepack.commands import app

__all__ = ["app", "main"]


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
