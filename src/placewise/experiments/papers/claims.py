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
    cause: str = ""  # why it does not hold for us, as measured by the command that it names


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in our table."""

    text: str
    holds: bool | None  # None: it was not measured
    num_holding: int  # rows in which it holds
    ours: dict[str, float]  # by label of the row
    paper: dict[str, float]
    cause: str


WHAT_IF = "(--what-if)"  # the option of `placewise reproduce` whose figures are quoted

EXPERT_OVERLAPS = "the expert's layers overlap over time steps"

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
        cause="two GPUs take 0.52 of one's time also by the best rule, and 0.56 with copies 64 times as long; one GPU is "
        f"best from launches of 0.3 ms on {WHAT_IF}. The paper's RNNLM is smaller: 0.44 s is less than 4 layers of 2048 "
        "take at a K80's peak",
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
        cause=f"{EXPERT_OVERLAPS} on all GPUs, and there are four functions. Where launches take 0.1 ms the host is the "
        "limit, and functions are ahead by 5 and 6%; copies must take 64 times as long for it on four GPUs, and that is "
        f"not enough on eight {WHAT_IF}",
    ),
    Claim("post", "Post finds better placements than the policy gradient", of="Post", to="policy gradient", below=1.0),
    Claim("post", "Post finds better placements than PPO alone", of="Post", to="PPO", below=1.0),
    Claim(
        "post",
        "Post finds better placements than cross-entropy alone",
        of="Post",
        to="cross-entropy",
        below=1.0,
        cause="they end within 3% of each other in every row, each ahead in some; Post is ahead early on "
        "(docs/results/post-figure-2.md)",
    ),
    Claim(
        "post",
        "Metis takes more than twice the time of one GPU",
        of="Metis",
        to="single GPU",
        least=2.0,
        families=(*RESNETS, "RNNLM", "Inception-V3"),
        cause="copies are cheap: they must take 8 to 64 times as long for it in five of the eight rows, and even that is "
        f"not enough for RNNLM, ResNet-200 and Inception-V3 on two GPUs {WHAT_IF}. Our Metis weights ops by their time and "
        "edges by the time of their copies",
    ),
    Claim(
        "post",
        "on NMT, Metis is slower than the expert",
        of="Metis",
        to="expert",
        least=1.0,
        families=NMTS,
        cause=f"copies are cheap: it holds in all rows where they take 8 times as long {WHAT_IF}",
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
        cause="on CNNs copies rarely wait for each other: HEFT's own model of the machine, in which they never do, expects "
        "0.91 and 0.84 of the time that it gets, and on NMT-2 0.37. HEFT knows the times that it is judged by, and the "
        "better of two orders counts",
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
        cause="the best rule beats the expert by 8% on RNNLM with copies as they are, and by at most 3% with slower copies "
        f"or launches and on NMT-8 {WHAT_IF}",
    ),
    Claim(
        "spotlight",
        "Spotlight beats ColocRL",
        of="Spotlight",
        to="ColocRL",
        below=1.0,
        cause="with the same blocks and the same path past the decoder, they differ no more than their seeds do, up to 12%",
    ),
    Claim(
        "spotlight",
        "the CIFAR-10 CNN gains more than 10% from a second GPU",
        of="Spotlight",
        to="single GPU",
        below=GAIN,
        families=("CIFAR-10 CNN",),
        cause=f"the step is a chain of layers: no placement takes less than 0.86 of one GPU's time {WHAT_IF}. Only a batch "
        "in micro-batches gains: towers takes 0.58",
    ),
    Claim(
        "spotlight",
        "Metis is slower than the expert",
        of="Metis",
        to="expert",
        least=1.0,
        families=("RNNLM", "NMT-8"),
        cause=f"copies are cheap: it holds in both rows where they take twice as long {WHAT_IF}",
    ),
    *(
        Claim(
            "hdp",
            f"HDP takes less than half the time of {name}",
            of="HDP",
            to=name,
            below=0.5,
            cause=f"copies are cheap: they must take {factors} times as long for the best rule to take less than half of "
            f"its time {WHAT_IF}",
        )
        for name, factors in (
            ("Scotch", "8 to 64"),
            ("MinCut", "8 to 64 (on ResNet-152, of which no placement takes less than 0.96 of MinCut's time, more)"),
        )
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
        cause=f"{EXPERT_OVERLAPS}: no rule beats them on NMT-4 by more than 2% {WHAT_IF}",
    ),
    Claim(
        "hdp",
        "on NMT-8, HDP does not beat the expert",
        of="HDP",
        to="expert",
        least=1.0,
        families=("NMT-8",),
        cause=f"the best rule beats the expert by 15%, and from copies that take 4 times as long by nothing {WHAT_IF}",
    ),
    Claim(
        "hdp",
        "grouping helps: learned groups are better than random ones",
        of="HDP",
        to="random groups",
        below=1.0,
        cause="where the grouper begins decides: `placewise bench neural` (docs/strategies/hdp.md) has each start with and "
        "without learning",
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
        cause="two GPUs take 0.61 of one's time by the expert's rule, however slow copies are; one GPU is best from "
        f"launches of 0.3 ms on {WHAT_IF}",
    ),
    Claim(
        "colocrl",
        "on NMT, ColocRL beats the expert",
        of="ColocRL",
        to="expert",
        below=1.0,
        families=("NMT-2",),
        cause=f"{EXPERT_OVERLAPS}; the best rule beats them by 10% on two GPUs and 25% on four {WHAT_IF}",
    ),
    Claim(
        "colocrl",
        "on Inception-V3, ColocRL is at most 5% slower than one GPU",
        of="ColocRL",
        to="single GPU",
        below=1.05,
        families=("Inception-V3",),
        cause="it ends a little above one GPU, which is the best rule in both rows",
    ),
    *(
        Claim(
            "colocrl",
            f"{name} takes more than twice the time of one GPU",
            of=name,
            to="single GPU",
            least=2.0,
            families=("RNNLM", "Inception-V3"),
            cause=f"copies are cheap: they must take {factors} times as long {WHAT_IF}. Our {name} weights ops by their "
            "time and edges by the time of their copies",
        )
        for name, factors in (("Scotch", "16 to 32"), ("MinCut", "16 to 32 (on Inception-V3 and two GPUs more than 64)"))
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
    return Verdict(claim.text, num_holding == len(ours) if ours else None, num_holding, ours, paper, claim.cause)


def found_ratio(result: ReproducedRow, of: str, to: str) -> float | None:
    """Returns one column's median divided by another's in our table; None if one is missing."""
    return _ratio(*(None if name not in result.found else result.found[name].median for name in (of, to)))


def reported_ratio(row: PaperRow, of: str, to: str) -> float | None:
    """Returns one column divided by another in the paper's table; None if one is missing."""
    return _ratio(row.reported.get(of), row.reported.get(to))


def _ratio(of: float | None, to: float | None) -> float | None:
    return None if of is None or not to else of / to
