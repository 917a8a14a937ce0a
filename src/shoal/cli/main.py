"""The `shoal` command: finds the command's module, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 a check failed or a run broke, 2 the request was wrong, 128 + n ended by signal n.
"""

import importlib
import sys
from collections.abc import Sequence

import shoal
from shoal.cli.options import Parser, print_json
from shoal.launch.local import RankDied, Stopped, stoppable
from shoal.spec.errors import RequestError
from shoal.train.summary import NotFinite, ReplicasDiffer

COMMANDS = {
    "train": "train a model under a layout: on this machine's processes, or joining torchrun's or Slurm's",
    "verify": "prove that a layout computes what one process computes and sends what the plan says",
    "sbatch": "print an sbatch file that runs a job on Slurm's hosts",
    "convert": "put the whole weights of a checkpoint into one safetensors file",
    "tokenize": "turn text, JSONL or a folder into a token file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `shoal argv`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    try:
        with stoppable():
            return _run(words)
    except RequestError as refused:
        return _fail(str(refused), 2, as_json, refused.field)
    except (RankDied, NotFinite, ReplicasDiffer) as failed:
        return _fail(str(failed), 1, as_json)
    except MemoryError as failed:
        return _fail(f"this machine's memory does not hold the request ({failed})", 1, as_json)
    except Stopped as stopped:
        return _fail(str(stopped), 128 + stopped.number, as_json)
    except BrokenPipeError:
        # The reader of our output, such as `head`, has seen enough.
        sys.stderr.close()
        return 0


def _fail(message: str, code: int, as_json: bool, field: str | None = None) -> int:
    """Says what went wrong, on stderr and with --json as a document too; the exit code."""
    if as_json:
        print_json({"ok": False, "error": {"field": field, "message": message}})
    print(f"shoal: {message}", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    parser = Parser(prog="shoal", description=shoal.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    module = None
    for name, words_of_help in COMMANDS.items():
        command = commands.add_parser(name, help=words_of_help, description=words_of_help, allow_abbrev=False)
        if name in words[:1]:
            module = importlib.import_module(f"shoal.cli.{name}")
            module.add_options(command)
            command.add_argument("--json", action="store_true", help="one JSON document on stdout, all else on stderr")
            parser = command
    if module is None:
        if words and not words[0].startswith("-"):
            raise RequestError(
                "command", f"{words[0]} is not a command of shoal; {', '.join(COMMANDS)} would do (see shoal --help)"
            )
        parser.parse_args(words or ["--help"])
        return 0
    return module.run(parser.parse_args(words[1:]))
