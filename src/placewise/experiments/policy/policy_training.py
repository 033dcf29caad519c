"""From a corpus to a file of weights: what `placewise train-policy` does."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from placewise import __version__
from placewise.core.errors import InputError
from placewise.core.graph import digest_of
from placewise.experiments.policy.corpus import draw_lessons
from placewise.experiments.policy.teaching import EXAMINED, Listen, Prepared, Teaching, examine, prepare, teach
from placewise.experiments.policy.teaching_record import TeachingRecord, opened_record
from placewise.formats.safetensors_file import write_safetensors
from placewise.strategies.learned.graph_policy.policy_network import PolicyNetwork


@dataclass(frozen=True)
class Training(Teaching):
    """How a network is taught, and on what."""

    lessons: int = 280
    hold_out: tuple[str, ...] = ()  # families


def check_device(device: str) -> None:
    """Refuses to train on a GPU that PyTorch can't use."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no GPU that PyTorch can use")


def train(training: Training, output: str | Path, run_file: str | Path | None, listen: Listen) -> dict[str, Any]:
    """Writes the weights, and returns how many bytes and lessons there are and how good they are on other lessons.

    What the run file has of the same training is not repeated; the weights are the same as without an interruption.
    """
    with opened_record(run_file) as record:
        prepared = prepare(draw_lessons(training.lessons, training.seed, training.hold_out), record, listen)
        network = learn(prepared, training, record, listen)
    write_network(network, output, training)
    examined = [one for number, one in enumerate(prepared) if not number % EXAMINED]
    return {
        "bytes": Path(output).stat().st_size,
        "lessons": len(prepared) - len(examined),
        "examined": len(examined),
        "ratio": examine(network, examined),
    }


def learn(prepared: Sequence[Prepared], training: Training, record: TeachingRecord, listen: Listen) -> PolicyNetwork:
    """Returns the network that learned from lessons; the record knows this training by a digest of all that matters."""
    settings = {name: value for name, value in asdict(training).items() if name != "device"}
    name = digest_of([str(sorted(settings.items())), *(one.lesson.key for one in prepared)])
    return teach(prepared, training, record, name, listen)


def write_network(network: PolicyNetwork, path: str | Path, training: Training) -> None:
    """Writes weights with how they were made."""
    made = {name: str(value) for name, value in asdict(training).items()}
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    write_safetensors(arrays, path, {**made, "format": "placewise-graph-policy", "version": "1", "placewise": __version__})
