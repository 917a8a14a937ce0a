"""`shoal convert`: the whole weights of a checkpoint as one safetensors file, in one process, whatever layout wrote them."""

import argparse
from pathlib import Path

from shoal.cli.options import print_json
from shoal.spec.errors import RequestError, refuse_choice
from shoal.spec.job import WIDTH
from shoal.train.checkpoint.folder import candidates
from shoal.train.checkpoint.index import Damaged, read_index
from shoal.train.data.naming import named


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or the folder of a run: its newest")
    parser.add_argument("--out", default="model.safetensors", metavar="FILE", help="file to write (model.safetensors)")
    parser.add_argument("--dtype", metavar="DTYPE", help=f"type of the weights: {', '.join(WIDTH)} (the run's own)")


def run(arguments: argparse.Namespace) -> int:
    given, out = Path(arguments.checkpoint), Path(arguments.out)
    if arguments.dtype is not None and arguments.dtype not in WIDTH:
        raise refuse_choice("--dtype", arguments.dtype, tuple(WIDTH), "float32")
    found = candidates(given)
    if not found:
        raise RequestError(
            "checkpoint",
            f"{named(given)} holds no checkpoint; a step-... folder would do, or that of a run which has some",
        )
    try:
        index = read_index(found[0])
        from shoal.train.checkpoint.convert import convert  # torch comes with it; what was wrong above answers at once

        size = convert(found[0], index, out, arguments.dtype or "")
    except Damaged as damaged:
        other = f"; {named(found[1])} may do" if len(found) > 1 else "; another one would do"
        raise RequestError("checkpoint", f"the checkpoint {named(found[0])} is not whole: {damaged}{other}") from None
    except OSError as error:
        raise RequestError(
            "--out", f"--out {named(out)} cannot be written ({error.strerror}); a file in a folder of yours would do"
        ) from None
    if arguments.json:
        print_json({"ok": True, "checkpoint": str(found[0]), "step": index.step, "out": str(out), "bytes": size})
    else:
        print(f"{named(out)}: the weights after {index.step} steps, {size:,} bytes")
    return 0
