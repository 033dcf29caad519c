"""What the papers claim in words, as inequalities between columns that anyone can check."""

import math
from dataclasses import dataclass

from placewise.experiments.papers.reported_results import BY_FUNCTION, HEFT_EXPECTS, OWN, PaperRow
from placewise.experiments.papers.reproduction import ReproducedRow, Reproduction

RESNETS, NMTS = ("ResNet-50", "ResNet-101", "ResNet-200"), ("NMT-2", "NMT-4", "NMT-8")

TENTH = 0.9  # less than a tenth is not worth a second GPU


@dataclass(frozen=True)
class Claim:
    """Of a paper: in every row of some models, `of` / `to` is at least `least` and below `below`."""

    paper: str
    text: str
    of: str  # a column
    to: str
    least: float = 0.0
    below: float = math.inf
    families: tuple[str, ...] = ()  # none: all models
    why_not: str = ""  # where it does not hold for us: what we take for the reason


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds in our table."""

    text: str
    holds: bool | None  # None: it was not measured
    num_holding: int  # rows in which it holds
    ours: dict[str, float]  # by row's label
    paper: dict[str, float]
    why_not: str


OWN_QUEUES = (
    "here a copy runs beside the ops at the speed of PCIe, and no launch waits for the host; on the papers' machines a cut "
    "must have cost far more"
)

CLAIMS = (
    Claim(
        *("post", "ResNets are best on one GPU: Post ends within a tenth of it", "Post", "single GPU"),
        least=TENTH,
        below=2 - TENTH,
        families=RESNETS,
    ),
    Claim(
        *("post", "ResNets are best on one GPU: placewise's own answer saves less than a tenth", OWN, "single GPU"),
        least=TENTH,
        families=RESNETS,
    ),
    Claim(
        *("post", "RNNLM is best on one GPU: Post ends within a tenth of it", "Post", "single GPU"),
        least=TENTH,
        below=2 - TENTH,
        families=("RNNLM",),
        why_not=f"the layers' steps overlap like a pipeline, and {OWN_QUEUES}; the paper's RNNLM is also a smaller one, for "
        "0.44 s is less than 4 layers of 2048 take at a K80's peak",
    ),
    Claim(
        *("post", "Inception-V3 gains more than a tenth from several GPUs", "Post", "single GPU"),
        below=TENTH,
        families=("Inception-V3",),
    ),
    Claim(*("post", "on NMT Post beats the expert", "Post", "expert"), below=1.0, families=NMTS),
    Claim(
        *("post", "on two GPUs NMT split by function beats NMT split by layer", BY_FUNCTION, "expert"),
        below=1.0,
        families=("NMT-2",),
    ),
    Claim(
        *("post", "on four and eight GPUs NMT split by function beats NMT split by layer", BY_FUNCTION, "expert"),
        below=1.0,
        families=("NMT-4", "NMT-8"),
        why_not="there are four functions to share, while layers use all GPUs; the zoo's attention feeds nothing back, "
        "so that the layers' steps overlap, while the decoder as a whole waits for the encoder's end",
    ),
    Claim("post", "Post finds better placements than the policy gradient", "Post", "policy gradient", below=1.0),
    Claim("post", "Post finds better placements than PPO alone", "Post", "PPO", below=1.0),
    Claim(
        *("post", "Post finds better placements than cross-entropy alone", "Post", "cross-entropy"),
        below=1.0,
        why_not="at the end both narrow the same table by the same steps; early Post is ahead "
        "(docs/results/post-figure-2.md)",
    ),
    Claim(
        *("post", "Metis takes more than twice the time of one GPU", "Metis", "single GPU"),
        least=2.0,
        families=(*RESNETS, "RNNLM", "Inception-V3"),
        why_not=f"{OWN_QUEUES}; our Metis weighs ops by their seconds and edges by the seconds of their copies",
    ),
    Claim(
        *("post", "on NMT Metis is slower than the expert", "Metis", "expert"),
        least=1.0,
        families=NMTS,
        why_not=OWN_QUEUES,
    ),
    Claim("post", "placewise's own answer is at most as slow as Post's (our claim)", OWN, "Post", below=1.0),
    *(
        Claim("post-appendix", f"Post finds better placements than {name}", "Post", name, below=1.0)
        for name in ("random search", "hill climbing", "genetic")
    ),
    Claim(
        *("post-appendix", "on CNNs HEFT is poor: it takes more than twice as long as Post", "HEFT", "Post"),
        least=2.0,
        families=("ResNet-50", "Inception-V3"),
        why_not="our HEFT knows the seconds that it is judged by, the better of two orders counts, and little contends "
        "for the links where ops are long against their copies",
    ),
    Claim(
        *("post-appendix", "on NMT contention is real: HEFT expects less than half of what it gets", HEFT_EXPECTS, "HEFT"),
        below=0.5,
        families=NMTS,
    ),
    Claim(
        *(
            "post-appendix",
            "where contention is real HEFT is poor: it takes more than twice as long as Post",
            "HEFT",
            "Post",
        ),
        least=2.0,
        families=NMTS,
    ),
    Claim(
        *("spotlight", "on RNNLM and NMT Spotlight beats the expert", "Spotlight", "expert"),
        below=1.0,
        families=("RNNLM", "NMT-8"),
        why_not="the expert's layers overlap well here, and few hundred updates of a network do not find as much",
    ),
    Claim("spotlight", "Spotlight beats ColocRL", "Spotlight", "ColocRL", below=1.0),
    Claim(
        *("spotlight", "the CIFAR-10 CNN gains more than a tenth from a second GPU", "Spotlight", "single GPU"),
        below=TENTH,
        families=("CIFAR-10 CNN",),
        why_not="its step is a chain of layers: the work beside the longest path is too little for a second GPU",
    ),
    Claim(
        *("spotlight", "Metis is slower than the expert", "Metis", "expert"),
        least=1.0,
        families=("RNNLM", "NMT-8"),
        why_not=OWN_QUEUES,
    ),
    *(
        Claim(
            *("hdp", f"HDP beats {name} by far: by more than half", "HDP", name),
            below=0.5,
            why_not=f"{OWN_QUEUES}; and our HDP learns little in its budget (docs/strategies/hdp.md)",
        )
        for name in ("Scotch", "MinCut")
    ),
    Claim(
        *("hdp", "HDP is at most as slow as one GPU, within a twentieth", "HDP", "single GPU"),
        below=1.05,
        families=("Inception-V3", "ResNet-152", "RNNLM"),
    ),
    Claim(
        *("hdp", "on NMT-2 and NMT-4 HDP beats the expert", "HDP", "expert"),
        below=1.0,
        families=("NMT-2", "NMT-4"),
        why_not="the expert's layers overlap well here, and our HDP learns little in its budget (docs/strategies/hdp.md)",
    ),
    Claim("hdp", "on NMT-8 HDP does not beat the expert", "HDP", "expert", least=1.0, families=("NMT-8",)),
    Claim(
        *("hdp", "grouping helps: learned groups are better than random ones", "HDP", "random groups"),
        below=1.0,
        why_not="so few updates teach the placer more than the grouper; the groups are still nearly random",
    ),
    Claim(
        *("hdp", "the CPU alone takes more than twice the time of one GPU", "CPU only", "single GPU"),
        least=2.0,
        families=("Inception-V3", "RNNLM"),
    ),
    Claim(
        *("colocrl", "ColocRL finds one GPU for RNNLM: it is within a twentieth of it", "ColocRL", "single GPU"),
        least=0.95,
        below=1.05,
        families=("RNNLM",),
        why_not="two GPUs are faster here, and it finds that: the layers' steps overlap",
    ),
    Claim(
        *("colocrl", "on NMT ColocRL beats the expert", "ColocRL", "expert"),
        below=1.0,
        families=("NMT-2",),
        why_not="the expert's layers overlap well here, and few hundred updates of a network do not find as much",
    ),
    Claim(
        *("colocrl", "ColocRL is at most as slow as one GPU on Inception-V3, within a twentieth", "ColocRL", "single GPU"),
        below=1.05,
        families=("Inception-V3",),
        why_not="few hundred updates of a network do not come down to one GPU from an even distribution",
    ),
    *(
        Claim(
            *("colocrl", f"{name} takes more than twice the time of one GPU", name, "single GPU"),
            least=2.0,
            families=("RNNLM", "Inception-V3"),
            why_not=f"{OWN_QUEUES}; our {name} weighs ops by their seconds and edges by the seconds of their copies",
        )
        for name in ("Scotch", "MinCut")
    ),
    Claim(
        *("colocrl", "the CPU alone takes more than twice the time of one GPU", "CPU only", "single GPU"),
        least=2.0,
        families=("RNNLM", "Inception-V3"),
    ),
)


def judge(reproduction: Reproduction) -> list[Verdict]:
    """Returns what holds of the paper's claims in our table."""
    return [_judge(claim, reproduction) for claim in CLAIMS if claim.paper == reproduction.paper.name]


def _judge(claim: Claim, reproduction: Reproduction) -> Verdict:
    results = [r for r in reproduction.results if not claim.families or r.row.family in claim.families]
    ours = {r.row.label: ratio for r in results if (ratio := found_ratio(r, claim.of, claim.to)) is not None}
    paper = {r.row.label: ratio for r in results if (ratio := reported_ratio(r.row, claim.of, claim.to)) is not None}
    num_holding = sum(claim.least <= ratio < claim.below for ratio in ours.values())
    return Verdict(claim.text, num_holding == len(ours) if ours else None, num_holding, ours, paper, claim.why_not)


def found_ratio(result: ReproducedRow, of: str, to: str) -> float | None:
    """Returns one column's median over another's in our table; None where one is missing."""
    return _ratio(*(None if name not in result.found else result.found[name].median for name in (of, to)))


def reported_ratio(row: PaperRow, of: str, to: str) -> float | None:
    """Returns one column over another in the paper's table; None where one is missing."""
    return _ratio(row.reported.get(of), row.reported.get(to))


def _ratio(of: float | None, to: float | None) -> float | None:
    return None if of is None or not to else of / to
