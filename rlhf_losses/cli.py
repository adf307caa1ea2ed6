"""The command ``rlhf-losses``."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Subcommands: bench, time and check the ops beside others (its options: ``rlhf-losses bench --help``)."""
    parser = argparse.ArgumentParser(prog="rlhf-losses", description="Losses of language models without the logits.")
    parser.add_argument("command", choices=["bench"], help="bench: time and check the ops beside others")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the command; --help shows them")
    arguments = parser.parse_args(argv)
    # Imported only now, so that the command itself and the package stay light.
    from rlhf_losses.benchmarks import bench

    bench.main(arguments.options)


if __name__ == "__main__":
    main()
