"""placewise train-policy: makes weights for the strategy graph-policy."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_folder, check_writable, print_json, warn
from placewise.cli.progress import Line, Shown
from placewise.cli.shared_options import add_command, add_run_file_option, count_argument, positive_argument
from placewise.cli.tensorboard_curves import scalars

if TYPE_CHECKING:
    from placewise.experiments.policy.teaching import Report

STAGES = {"label": "labels", "imitation": "imitation", "gradient": "policy gradient"}


def add_train_policy(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "train-policy", _train_policy, "make weights for graph-policy from generated problems, which auto solves"
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="write the weights to this safetensors file")
    add_run_file_option(parser)
    parser.add_argument(
        "--hold-out", metavar="FAMILY", action="append", default=[], help="leave out a family of models (can be repeated)"
    )
    parser.add_argument("--lessons", metavar="N", type=positive_argument, help="problems to learn from (default: 280)")
    parser.add_argument("--imitation", metavar="N", type=count_argument, help="epochs of imitating auto (default: 6)")
    parser.add_argument("--gradient", metavar="N", type=count_argument, help="epochs of policy gradient (default: 30)")
    parser.add_argument("--seed", metavar="N", type=count_argument, default=0, help="random seed (default: 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what trains the network (default: cpu)")
    parser.add_argument("--tensorboard", metavar="DIR", help="write learning curves for TensorBoard to this folder")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _train_policy(options: argparse.Namespace) -> None:
    from placewise.core.errors import InputError
    from placewise.core.suggestions import did_you_mean
    from placewise.experiments.policy.corpus import FAMILIES

    try:
        from placewise.experiments.policy.policy_training import Training, check_device, train
    except ModuleNotFoundError:
        raise InputError("train-policy needs PyTorch: pip install 'placewise[learned]'") from None
    check_writable(options.output, options.run_file)
    check_folder(options.tensorboard)
    for family in options.hold_out:
        if family not in FAMILIES:
            raise InputError(f"--hold-out: unknown family {family!r}: {did_you_mean(family, FAMILIES)}")
    if set(options.hold_out) >= set(FAMILIES):
        raise InputError("--hold-out leaves no family to learn from")
    check_device(options.device)
    given = {"lessons": options.lessons, "imitation_epochs": options.imitation, "gradient_epochs": options.gradient}
    chosen = {name: value for name, value in given.items() if value is not None}
    training = Training(hold_out=tuple(options.hold_out), seed=options.seed, device=options.device, **chosen)
    with Line(options) as line, scalars(options.tensorboard) as write:

        def listen(report: "Report") -> None:
            if report.stage != "label":
                write(f"{report.stage}/ratio", report.ratio, report.number)
                write(f"{report.stage}/loss", report.loss, report.number)
            is_last = report.number == report.total
            if line.is_due or is_last:
                line.show(Shown(_in_words(report), report.number / report.total))
            if is_last and not options.quiet:
                warn(_in_words(report))

        found = train(training, options.output, options.run_file, listen)
    if options.json:
        print_json(found)
    elif not options.quiet:
        print(
            f"{options.output}: {found['bytes']:,} bytes, learned from {found['lessons']:,} problems; "
            f"on {found['examined']:,} others, greedy placements take {found['ratio']:.3f} times as long as auto's"
        )


def _in_words(report: "Report") -> str:
    """Returns one line on an epoch."""
    line = f"{STAGES[report.stage]}: {report.number:,} of {report.total:,}"
    return line if report.stage == "label" else f"{line}, greedy / auto on other problems {report.ratio:.3f}"
