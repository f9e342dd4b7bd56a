"""The command: check it, let Hydra compose it, hand each job to its task.

Exit codes: 0 fine, 1 a fault or a failed job of a sweep, 2 a mistake in the configuration or an
input, or nothing set up yet, 3 `accel.strict` found something eager, 129 the terminal was closed,
130 Ctrl-C, 143 SIGTERM.
"""

import sys

# Type checkers take it for true. Nothing is loaded before `main`, where Ctrl-C would end in a traceback: no
# `typing`, and no `__future__`, so that annotations are in quotes.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(cfg: "DictConfig") -> "float | None":
    """One job. Stands here because Hydra names the log and looks for `conf` after this file."""
    from tasks.command import run_job

    return run_job(cfg)


def main() -> int:
    try:
        from tasks.command import execute  # what has to be installed is imported here

        return execute(run)
    except ModuleNotFoundError as error:
        print(f"{error}. Set up once with: make run. Then use .venv/bin/python run.py", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
