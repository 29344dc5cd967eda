"""The command line, as `jetspec` and as `python -m jetspec`."""


def main() -> None:
    try:
        from jetspec.commands.app import main as run
    except KeyboardInterrupt:  # an interrupt during imports shows no traceback
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
