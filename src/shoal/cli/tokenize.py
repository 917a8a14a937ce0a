"""`shoal tokenize`: text, JSONL or a folder into a token file, once, for many runs."""

import argparse
import sys
from pathlib import Path

from shoal.cli.options import print_json
from shoal.spec.errors import RequestError
from shoal.spec.job import DataSpec


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", default="", help="text, .jsonl or folder; nothing = Python's standard library"
    )
    parser.add_argument("--out", required=True, metavar="FILE.tokens", help="the token file to write")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (the default), or the path of a tokenizer.json")
    parser.add_argument("--field", default="text", help="key of the text in each JSONL line (default: text)")


def run(arguments: argparse.Namespace) -> int:
    from shoal.train.data.corpus import write_tokens
    from shoal.train.data.tokens import TokenFile

    target = Path(arguments.out)
    if target.suffix != ".tokens":
        raise RequestError("out", f"--out {target} does not end in .tokens; {target.with_suffix('.tokens')} would do")
    data = DataSpec(path=arguments.path, tokenizer=arguments.tokenizer, field=arguments.field)
    write_tokens(data, target, show_progress=True, target_field="out")
    header = TokenFile.open(target).header
    tokenizer = "" if arguments.tokenizer == "bytes" else f" --data.tokenizer {arguments.tokenizer}"
    print(
        f"{target}: {header.tokens:,} tokens in {header.documents:,} documents, vocabulary {header.vocab:,}; "
        f"shoal train --data.path {target}{tokenizer} --model.vocab {header.vocab} reads it",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    if arguments.json:
        print_json(
            {
                "ok": True,
                "path": str(target),
                "tokens": header.tokens,
                "documents": header.documents,
                "vocab": header.vocab,
            }
        )
    return 0
