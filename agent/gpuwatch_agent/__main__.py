"""The agent in a fresh interpreter: `gpuwatch agent` parses its options and then execs this, in the same process.

The option parsing (typer, every command) would otherwise stay in memory: a dozen MB of the agent's budget of 70.
"""

import logging
import os
import pickle
import sys

from gpuwatch.config import Config
from gpuwatch.errors import ConfigError, GpuwatchError


def go_on_as_agent(config: Config) -> None:
    """Replace this program by the agent; where exec fails, run the agent in it. Raises: ConfigError.

    The options are passed in anonymous memory that no other process sees: they may hold a password.
    """
    level = logging.getLogger().getEffectiveLevel()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        memory = os.memfd_create("gpuwatch-agent-options")
        with os.fdopen(os.dup(memory), "wb") as file:
            pickle.dump((config, level), file)
        os.lseek(memory, 0, os.SEEK_SET)
        os.set_inheritable(memory, True)
        # glibc then gives freed blocks of 64 KiB and more back: it would keep what one flood or long answer took.
        # And -m would import modules of the current folder, such as a user's queue.py.
        environment = {"MALLOC_MMAP_THRESHOLD_": "65536", **os.environ, "PYTHONSAFEPATH": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "gpuwatch_agent", "--options-from", str(memory)], environment)
    except OSError as error:  # forbidden here
        logging.getLogger(__name__).debug("the agent continues in the same interpreter: %s", error)
    from gpuwatch_agent.main import run_agent

    run_agent(config)


def main() -> None:
    """Run the agent; exit codes are those of `gpuwatch`."""
    if len(sys.argv) != 3 or sys.argv[1] != "--options-from" or not sys.argv[2].isdigit():
        print("gpuwatch_agent: start it as `gpuwatch agent`", file=sys.stderr)
        sys.exit(2)
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        config, level = pickle.load(file)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        from gpuwatch_agent.main import run_agent

        run_agent(config)
    except GpuwatchError as error:
        print(f"gpuwatch: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
