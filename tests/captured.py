"""A captured training step that is kept in a file, and the folder of golden files."""

from pathlib import Path

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.formats.graph_file import read_graph

GOLDEN = Path(__file__).parent / "golden"


def captured_problem() -> Problem:
    """Returns a training step of a small language model on two GPUs and a CPU.

    The graph is rnnlm:layers=2,hidden=512,steps=3,batch=64,vocab=1000 as it was once captured, kept in a file so that
    another version of torch does not change it.
    """
    return Problem.of(read_graph(str(GOLDEN / "captured.json.gz")), Cluster.load("2xK80"))
