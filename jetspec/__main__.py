"""The command line, as `jetspec` and as `python -m jetspec`."""


def main() -> None:
    try:
        from jetspec.commands.app import main as run
    except KeyboardInterrupt:  # the impatient need no traceback of imports
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
