"""`python -m headway` and the `headway` command."""


def main() -> None:
    from headway.cli import run

    run()


if __name__ == "__main__":
    main()
