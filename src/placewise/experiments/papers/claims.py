"""What the papers claim in words, as inequalities between columns that anyone can check."""

import math
from dataclasses import dataclass

from placewise.experiments.papers.reported_results import BY_FUNCTION, HEFT_EXPECTS, OWN, PaperRow
from placewise.experiments.papers.reproduction import ReproducedRow, Reproduction

RESNETS, NMTS = ("ResNet-50", "ResNet-101", "ResNet-200"), ("NMT-2", "NMT-4", "NMT-8")

GAIN = 0.9  # a ratio above it is not worth a second GPU


@dataclass(frozen=True)
class Claim:
    """A paper's claim: in every row of some models, column `of` / column `to` is at least `least` and below `below`."""

    paper: str
    text: str
    of: str
    to: str
    least: float = 0.0
    below: float = math.inf
    families: tuple[str, ...] = ()  # empty: all models
    why_not: str = ""  # what we think is the reason if it does not hold for us


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in our table."""

    text: str
    holds: bool | None  # None: it was not measured
    num_holding: int  # rows in which it holds
    ours: dict[str, float]  # by label of the row
    paper: dict[str, float]
    why_not: str


CHEAP_CUTS = (
    "here copies overlap with ops at the speed of PCIe, and launches never wait for the host; on the papers' machines "
    "cutting the graph must have cost far more"
)

FEW_UPDATES = "the expert's layers overlap well here, and a few hundred updates of a network don't find anything better"

HDP_LEARNS_LITTLE = "our HDP learns little in its budget (docs/strategies/hdp.md)"

CLAIMS = (
    Claim(
        "post",
        "ResNets are best on one GPU: Post ends within 10% of it",
        of="Post",
        to="single GPU",
        least=GAIN,
        below=2 - GAIN,
        families=RESNETS,
    ),
    Claim(
        "post",
        "ResNets are best on one GPU: placewise saves less than 10%",
        of=OWN,
        to="single GPU",
        least=GAIN,
        families=RESNETS,
    ),
    Claim(
        "post",
        "RNNLM is best on one GPU: Post ends within 10% of it",
        of="Post",
        to="single GPU",
        least=GAIN,
        below=2 - GAIN,
        families=("RNNLM",),
        why_not=f"the layers overlap over time steps like a pipeline, and {CHEAP_CUTS}; the paper's RNNLM is also smaller: "
        "0.44 s is less than 4 layers of 2048 take at a K80's peak",
    ),
    Claim(
        "post",
        "Inception-V3 gains more than 10% from several GPUs",
        of="Post",
        to="single GPU",
        below=GAIN,
        families=("Inception-V3",),
    ),
    Claim("post", "on NMT, Post beats the expert", of="Post", to="expert", below=1.0, families=NMTS),
    Claim(
        "post",
        "on two GPUs, NMT split by function beats NMT split by layer",
        of=BY_FUNCTION,
        to="expert",
        below=1.0,
        families=("NMT-2",),
    ),
    Claim(
        "post",
        "on four and eight GPUs, NMT split by function beats NMT split by layer",
        of=BY_FUNCTION,
        to="expert",
        below=1.0,
        families=("NMT-4", "NMT-8"),
        why_not="there are only four functions to distribute, while layers use all GPUs; the zoo's attention feeds nothing "
        "back, so layers overlap over time steps, while the whole decoder waits for the end of the encoder",
    ),
    Claim("post", "Post finds better placements than the policy gradient", of="Post", to="policy gradient", below=1.0),
    Claim("post", "Post finds better placements than PPO alone", of="Post", to="PPO", below=1.0),
    Claim(
        "post",
        "Post finds better placements than cross-entropy alone",
        of="Post",
        to="cross-entropy",
        below=1.0,
        why_not="in the end both narrow the same table with the same updates; Post is ahead early on "
        "(docs/results/post-figure-2.md)",
    ),
    Claim(
        "post",
        "Metis takes more than twice the time of one GPU",
        of="Metis",
        to="single GPU",
        least=2.0,
        families=(*RESNETS, "RNNLM", "Inception-V3"),
        why_not=f"{CHEAP_CUTS}; our Metis weights ops by their time and edges by the time of their copies",
    ),
    Claim(
        "post",
        "on NMT, Metis is slower than the expert",
        of="Metis",
        to="expert",
        least=1.0,
        families=NMTS,
        why_not=CHEAP_CUTS,
    ),
    Claim("post", "placewise is at least as fast as Post (our claim)", of=OWN, to="Post", below=1.0),
    *(
        Claim("post-appendix", f"Post finds better placements than {name}", of="Post", to=name, below=1.0)
        for name in ("random search", "hill climbing", "genetic")
    ),
    Claim(
        "post-appendix",
        "on CNNs, HEFT is poor: it takes more than twice as long as Post",
        of="HEFT",
        to="Post",
        least=2.0,
        families=("ResNet-50", "Inception-V3"),
        why_not="our HEFT knows the times that it is judged by, the better of two orders counts, and links are rarely "
        "contended where ops take long compared with their copies",
    ),
    Claim(
        "post-appendix",
        "on NMT, links are contended: HEFT expects less than half the time that it gets",
        of=HEFT_EXPECTS,
        to="HEFT",
        below=0.5,
        families=NMTS,
    ),
    Claim(
        "post-appendix",
        "where links are contended, HEFT is poor: it takes more than twice as long as Post",
        of="HEFT",
        to="Post",
        least=2.0,
        families=NMTS,
    ),
    Claim(
        "spotlight",
        "on RNNLM and NMT, Spotlight beats the expert",
        of="Spotlight",
        to="expert",
        below=1.0,
        families=("RNNLM", "NMT-8"),
        why_not=FEW_UPDATES,
    ),
    Claim("spotlight", "Spotlight beats ColocRL", of="Spotlight", to="ColocRL", below=1.0),
    Claim(
        "spotlight",
        "the CIFAR-10 CNN gains more than 10% from a second GPU",
        of="Spotlight",
        to="single GPU",
        below=GAIN,
        families=("CIFAR-10 CNN",),
        why_not="its step is a chain of layers: there is too little work off the longest path for a second GPU",
    ),
    Claim(
        "spotlight",
        "Metis is slower than the expert",
        of="Metis",
        to="expert",
        least=1.0,
        families=("RNNLM", "NMT-8"),
        why_not=CHEAP_CUTS,
    ),
    *(
        Claim(
            "hdp",
            f"HDP takes less than half the time of {name}",
            of="HDP",
            to=name,
            below=0.5,
            why_not=f"{CHEAP_CUTS}; and {HDP_LEARNS_LITTLE}",
        )
        for name in ("Scotch", "MinCut")
    ),
    Claim(
        "hdp",
        "HDP is at most 5% slower than one GPU",
        of="HDP",
        to="single GPU",
        below=1.05,
        families=("Inception-V3", "ResNet-152", "RNNLM"),
    ),
    Claim(
        "hdp",
        "on NMT-2 and NMT-4, HDP beats the expert",
        of="HDP",
        to="expert",
        below=1.0,
        families=("NMT-2", "NMT-4"),
        why_not=f"the expert's layers overlap well here, and {HDP_LEARNS_LITTLE}",
    ),
    Claim("hdp", "on NMT-8, HDP does not beat the expert", of="HDP", to="expert", least=1.0, families=("NMT-8",)),
    Claim(
        "hdp",
        "grouping helps: learned groups are better than random ones",
        of="HDP",
        to="random groups",
        below=1.0,
        why_not="so few updates train the placer more than the grouper: the groups are still nearly random",
    ),
    Claim(
        "hdp",
        "the CPU alone takes more than twice the time of one GPU",
        of="CPU only",
        to="single GPU",
        least=2.0,
        families=("Inception-V3", "RNNLM"),
    ),
    Claim(
        "colocrl",
        "ColocRL puts RNNLM on one GPU: it ends within 5% of it",
        of="ColocRL",
        to="single GPU",
        least=0.95,
        below=1.05,
        families=("RNNLM",),
        why_not="two GPUs are faster here, since the layers overlap over time steps, and ColocRL finds that",
    ),
    Claim(
        "colocrl",
        "on NMT, ColocRL beats the expert",
        of="ColocRL",
        to="expert",
        below=1.0,
        families=("NMT-2",),
        why_not=FEW_UPDATES,
    ),
    Claim(
        "colocrl",
        "on Inception-V3, ColocRL is at most 5% slower than one GPU",
        of="ColocRL",
        to="single GPU",
        below=1.05,
        families=("Inception-V3",),
        why_not="a few hundred updates of a network don't get from an even distribution to a single GPU",
    ),
    *(
        Claim(
            "colocrl",
            f"{name} takes more than twice the time of one GPU",
            of=name,
            to="single GPU",
            least=2.0,
            families=("RNNLM", "Inception-V3"),
            why_not=f"{CHEAP_CUTS}; our {name} weights ops by their time and edges by the time of their copies",
        )
        for name in ("Scotch", "MinCut")
    ),
    Claim(
        "colocrl",
        "the CPU alone takes more than twice the time of one GPU",
        of="CPU only",
        to="single GPU",
        least=2.0,
        families=("RNNLM", "Inception-V3"),
    ),
)


def judge(reproduction: Reproduction) -> list[Verdict]:
    """Returns which of the paper's claims hold in our table."""
    return [_judge(claim, reproduction) for claim in CLAIMS if claim.paper == reproduction.paper.name]


def _judge(claim: Claim, reproduction: Reproduction) -> Verdict:
    results = [r for r in reproduction.results if not claim.families or r.row.family in claim.families]
    ours = {r.row.label: ratio for r in results if (ratio := found_ratio(r, claim.of, claim.to)) is not None}
    paper = {r.row.label: ratio for r in results if (ratio := reported_ratio(r.row, claim.of, claim.to)) is not None}
    num_holding = sum(claim.least <= ratio < claim.below for ratio in ours.values())
    return Verdict(claim.text, num_holding == len(ours) if ours else None, num_holding, ours, paper, claim.why_not)


def found_ratio(result: ReproducedRow, of: str, to: str) -> float | None:
    """Returns one column's median divided by another's in our table; None if one is missing."""
    return _ratio(*(None if name not in result.found else result.found[name].median for name in (of, to)))


def reported_ratio(row: PaperRow, of: str, to: str) -> float | None:
    """Returns one column divided by another in the paper's table; None if one is missing."""
    return _ratio(row.reported.get(of), row.reported.get(to))


def _ratio(of: float | None, to: float | None) -> float | None:
    return None if of is None or not to else of / to
