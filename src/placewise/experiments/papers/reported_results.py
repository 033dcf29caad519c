"""What the papers reported: their result tables, and which strategy of ours reproduces each column.

Numbers are seconds per training step as printed, None if the step did not fit. Sizes that a paper does not state are the
zoo's (docs/zoo.md). Machines are the closest presets; `Paper.notes` has the differences.

    post            Gao, Chen, Li: Post: Device Placement with Cross-Entropy Minimization and Proximal Policy
                    Optimization. NeurIPS 2018. Table 1, and the appendix's comparison with other searches. `post-parts`
                    is ours: how much each of its two parts does.
    spotlight       Gao, Chen, Li: Spotlight: Optimizing Device Placement for Training Deep Neural Networks. ICML 2018.
    hdp             Mirhoseini, Goldie, Pham, Steiner, Le, Dean: A Hierarchical Model for Device Placement. ICLR 2018.
    colocrl         Mirhoseini et al.: Device Placement Optimization with Reinforcement Learning. ICML 2017.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

OWN = "placewise"  # the column of our default strategy

BY_FUNCTION = "by function"  # the column of NMT with encoder, decoder, attention and softmax each on one GPU

HEFT_EXPECTS = "HEFT expects"  # the column of the time that HEFT's own model predicts, in which copies never wait


@dataclass(frozen=True)
class PaperColumn:
    """A column of a paper's table, and the strategy that reproduces it."""

    name: str
    strategy: str
    settings: Mapping[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ()  # the only models that have this column; empty: all
    in_micro_batches: bool = False  # the model in as many micro-batches as there are GPUs


@dataclass(frozen=True)
class PaperRow:
    """A model on a machine, and what the paper reported for it."""

    family: str  # the model, as the paper calls it
    num_gpus: int
    model: str
    cluster: str
    reported: Mapping[str, float | None] = field(default_factory=dict)  # by column; None: out of memory
    quick_model: str = ""  # a smaller one of the same kind; empty: not in the quick version

    @property
    def label(self) -> str:
        """The row's title."""
        return f"{self.family}, {self.num_gpus} GPUs"

    def model_of(self, column: PaperColumn) -> str:
        """Returns the model that a column places."""
        if not column.in_micro_batches:
            return self.model
        return f"{self.model}{',' if ':' in self.model else ':'}micro_batches={self.num_gpus}"

    def has(self, column: PaperColumn) -> bool:
        """Returns whether the column exists for this row."""
        return not column.families or self.family in column.families


@dataclass(frozen=True)
class Paper:
    """One table of a paper."""

    name: str
    title: str
    system: str  # the column that the paper is about
    columns: tuple[PaperColumn, ...]
    rows: tuple[PaperRow, ...]
    compared: tuple[str, ...]  # columns that the system is compared with
    quick_evaluations: int
    steps_per_trial: int = 10  # that the paper runs to measure a placement
    fitted: Mapping[str, str] = field(default_factory=dict)  # kind of device -> the column that its calibration uses
    notes: tuple[str, ...] = ()


ONE, EXPERT, METIS = (
    PaperColumn("single GPU", "gpu-only"),
    PaperColumn("expert", "expert"),
    PaperColumn("Metis", "metis"),
)

CPU, SCOTCH, MINCUT = (
    PaperColumn("CPU only", "cpu-only"),
    PaperColumn("Scotch", "scotch"),
    PaperColumn("MinCut", "mincut"),
)

CONTROL = PaperColumn("no learning", "even")

NMT_FED = "input_feeding=true"  # the zoo's NMT whose decoder waits for the attention of the step before

AUTO = PaperColumn(OWN, "auto")

SMALL_NMT, SMALL_RNNLM = "length=5", "steps=5"  # quick models: full width, few time steps


def _reported(names: Iterable[str], *seconds: float | None) -> dict[str, float | None]:
    return dict(zip(names, seconds, strict=True))


# --- Post, table 1 ---

_POST = ("single GPU", "expert", "Metis", "policy gradient", "Post")

_POST_NMT = {2: (2.05, 7.47, 2.30, 1.22), 4: (3.43, 11.04, 4.08, 2.13), 8: (5.11, 12.74, 5.35, 2.20)}

POST = Paper(
    "post",
    "Post (NeurIPS 2018), table 1",
    "Post",
    (
        ONE,
        EXPERT,
        METIS,
        PaperColumn("policy gradient", "policy-gradient"),
        PaperColumn("PPO", "ppo"),
        PaperColumn("cross-entropy", "cross-entropy"),
        PaperColumn("Post", "post"),
        CONTROL,
        AUTO,
    ),
    (
        PaperRow(
            "RNNLM",
            2,
            "rnnlm:layers=4",
            "2xK80",
            _reported(_POST, 0.44, 0.89, 1.81, 0.66, 0.44),
            f"rnnlm:layers=4,{SMALL_RNNLM}",
        ),
        PaperRow("ResNet-50", 2, "resnet", "2xK80", _reported(_POST, 0.86, 0.86, 4.47, 1.49, 0.86), "resnet"),
        PaperRow("ResNet-200", 2, "resnet:depth=200", "2xK80", _reported(_POST, 2.75, 2.75, 11.63, 3.62, 2.75)),
        PaperRow("ResNet-50", 4, "resnet", "4xK80", _reported(_POST, 0.86, 0.86, 4.21, 2.37, 0.86), "resnet"),
        PaperRow("ResNet-101", 8, "resnet:depth=101", "8xK80", _reported(_POST, 1.59, 1.59, 7.31, 2.90, 1.59)),
        *(
            PaperRow("Inception-V3", gpus, "inception-v3", f"{gpus}xK80", _reported(_POST, *seconds), "inception-v3")
            for gpus, seconds in (
                (2, (1.79, 1.79, 6.76, 2.15, 1.30)),
                (4, (1.75, 1.75, 6.07, 1.82, 1.19)),
                (8, (1.78, 1.78, 7.35, 2.67, 1.29)),
            )
        ),
        *(
            PaperRow(
                f"NMT-{layers}",
                layers,
                f"nmt:layers={layers}",
                f"{layers}xK80",
                _reported(_POST, None, *seconds),
                f"nmt:layers={layers},{SMALL_NMT}",
            )
            for layers, seconds in _POST_NMT.items()
        ),
        *(PaperRow(f"NMT-{layers} fed", layers, f"nmt:layers={layers},{NMT_FED}", f"{layers}xK80") for layers in _POST_NMT),
    ),
    ("single GPU", "expert", "policy gradient"),
    quick_evaluations=240,
    steps_per_trial=11,
    fitted={"gpu": "single GPU"},
    notes=(
        "PPO and cross-entropy are in the paper's figure 2, which does not have the times of their best placements.",
        "The rows 'fed' are ours: NMT with input feeding, of which the papers do not speak.",
    ),
)

# --- Post's two parts ---

POST_PARTS = Paper(
    "post-parts",
    "Post (NeurIPS 2018): the share of its two parts",
    "Post",
    (
        ONE,
        PaperColumn("PPO", "ppo"),
        PaperColumn("cross-entropy", "cross-entropy"),
        PaperColumn("Post", "post"),
        *(PaperColumn(f"Post N={count}", "post", {"elite_batch": str(count)}) for count in (24, 120, 240)),
        *(PaperColumn(f"Post K={count}", "post", {"batch": str(count)}) for count in (4, 30)),
        CONTROL,
    ),
    tuple(
        replace(row, reported={})
        for row in POST.rows
        if row.label in ("ResNet-50, 2 GPUs", "Inception-V3, 4 GPUs", "NMT-2, 2 GPUs", "NMT-4, 4 GPUs")
    ),
    ("PPO", "cross-entropy", "Post N=24", "Post N=120", "Post N=240", "Post K=4", "Post K=30"),
    quick_evaluations=240,
    steps_per_trial=11,
    notes=(
        "Post takes a proximal step every K = 12 placements and imitates the best tenth every N = 60; PPO and cross-entropy "
        "are these parts alone. The paper varies neither.",
    ),
)

# --- Post, appendix ---

EQUAL_SPACE, EVERY_GROUP = " (64 blocks)", " (every group)"  # in a column's name: in the space of Post, or of the others

_APPENDIX = ("single GPU", "random search", "hill climbing", "genetic", "HEFT", "Post")  # the first is from table 1

POST_APPENDIX = Paper(
    "post-appendix",
    "Post (NeurIPS 2018), appendix: other searches",
    "Post",
    (
        ONE,
        *(
            PaperColumn(f"{name}{title}", strategy, {**settings, **grouping})
            for title, grouping in (("", {}), (EQUAL_SPACE, {"grouping": "coarse:64"}))
            for name, strategy, settings in (
                ("random search", "random", {}),
                ("hill climbing", "hill-climb", {"start": "random"}),
                ("genetic", "genetic", {"start": "random"}),
            )
        ),
        PaperColumn("HEFT", "heft"),
        PaperColumn("Post", "post"),
        PaperColumn(f"Post{EVERY_GROUP}", "post", {"grouping": "colocated"}),
        AUTO,
    ),
    (
        PaperRow("ResNet-50", 2, "resnet", "2xK80", _reported(_APPENDIX, 0.86, 1.64, 1.52, 1.56, 3.41, 0.86), "resnet"),
        PaperRow(
            "Inception-V3",
            4,
            "inception-v3",
            "4xK80",
            _reported(_APPENDIX, 1.75, 1.92, 1.86, 2.03, 3.31, 1.19),
            "inception-v3",
        ),
        PaperRow("NMT-2", 2, "nmt:layers=2", "2xK80", {}, f"nmt:layers=2,{SMALL_NMT}"),
        PaperRow("NMT-4", 4, "nmt:layers=4", "4xK80", {}, f"nmt:layers=4,{SMALL_NMT}"),
    ),
    ("single GPU", "random search", "HEFT"),
    quick_evaluations=240,
    steps_per_trial=11,
    notes=(
        "Post decides for 64 blocks, the other three for every group: these are their own spaces. The columns '(64 blocks)' "
        "and '(every group)' have the other space.",
        "The NMT rows are ours: the paper has only the first two rows.",
        "Hill climbing and the genetic algorithm start from random placements; the paper does not state where its start.",
    ),
)

# --- Spotlight ---

_SPOTLIGHT = ("expert", "Metis", "ColocRL", "Spotlight")

SPOTLIGHT = Paper(
    "spotlight",
    "Spotlight (ICML 2018)",
    "Spotlight",
    (
        ONE,
        EXPERT,
        METIS,
        PaperColumn("towers", "towers", families=("CIFAR-10 CNN",), in_micro_batches=True),
        PaperColumn("ColocRL", "colocrl"),
        PaperColumn("Spotlight", "spotlight"),
        CONTROL,
        AUTO,
    ),
    (
        PaperRow(
            "CIFAR-10 CNN",
            2,
            "cifar-cnn",
            "2xK80",
            _reported(("single GPU", "ColocRL", "Spotlight"), 1.0, 0.70 / 0.609, 0.70),
            "cifar-cnn",
        ),
        PaperRow("CIFAR-10 CNN", 4, "cifar-cnn", "4xK80", _reported(("towers", "Spotlight"), 95 / 58, 1.0), "cifar-cnn"),
        PaperRow(
            "RNNLM",
            4,
            "rnnlm:layers=4",
            "4xK80",
            _reported(_SPOTLIGHT, 3.86, 6.12, 3.15, 2.27),
            f"rnnlm:layers=4,{SMALL_RNNLM}",
        ),
        PaperRow(
            "NMT-8",
            4,
            "nmt:layers=8",
            "4xK80",
            _reported(_SPOTLIGHT, 5.54, 10.50, 4.74, 3.62),
            f"nmt:layers=8,{SMALL_NMT}",
        ),
    ),
    ("single GPU", "expert", "ColocRL"),
    quick_evaluations=40,
    notes=(
        "CIFAR-10: the paper reports shares of the training time. Its figures are relative to one GPU on two GPUs; on four, "
        "where it has only synchronous data parallelism, to Spotlight.",
        "Towers: the batch is divided among the GPUs, the step's own micro-batches.",
        "The paper does not say how many layers its RNNLM has; we chose 4, as in Post by the same authors.",
    ),
)

# --- HDP ---

_HDP = ("CPU only", "single GPU", "expert", "Scotch", "MinCut", "HDP")

_HDP_NMT = {
    2: (6.46, None, 2.13, 3.21, 5.34, 0.84),
    4: (10.68, None, 3.64, 11.18, 11.63, 1.69),
    8: (11.52, None, 3.88, 17.85, 19.01, 4.07),
}

HDP = Paper(
    "hdp",
    "HDP (ICLR 2018), table 1",
    "HDP",
    (
        CPU,
        ONE,
        EXPERT,
        SCOTCH,
        MINCUT,
        PaperColumn("expert (one GPU)", "gpu-only", families=("RNNLM",)),
        PaperColumn("HDP", "hdp"),
        PaperColumn("random groups", "hdp", {"grouping": "fixed", "first_groups": "random"}),
        PaperColumn("its first groups", "hdp", {"grouping": "fixed"}),
        PaperColumn("no grouping", "hdp", {"grouping": "none"}, families=("Inception-V3", "ResNet-152")),
        PaperColumn("ColocRL", "colocrl"),
        CONTROL,
        AUTO,
    ),
    (
        PaperRow(
            "Inception-V3",
            2,
            "inception-v3",
            "2xK40",
            _reported(_HDP, 0.61, 0.15, 0.15, 0.93, 0.82, 0.13),
            "inception-v3",
        ),
        PaperRow("ResNet-152", 2, "resnet:depth=152", "2xK40", _reported(_HDP[1:], 1.18, 1.18, 6.27, 2.92, 1.18)),
        PaperRow(
            "RNNLM",
            2,
            "rnnlm",
            "2xK40",
            _reported(
                ("CPU only", "single GPU", "expert (one GPU)", "Scotch", "MinCut", "HDP"), 6.89, 1.57, 1.57, 5.62, 5.21, 1.57
            ),
            f"rnnlm:{SMALL_RNNLM}",
        ),
        *(
            PaperRow(
                f"NMT-{layers}",
                layers,
                f"nmt:layers={layers}",
                f"{layers}xK40",
                _reported(_HDP, *seconds),
                f"nmt:layers={layers},{SMALL_NMT}" if layers < 8 else "",
            )
            for layers, seconds in _HDP_NMT.items()
        ),
    ),
    ("single GPU", "expert", "Scotch", "MinCut"),
    quick_evaluations=40,
    fitted={"cpu": "CPU only", "gpu": "single GPU"},
    notes=(
        "Random groups: the paper says that they are worse, without figures; no grouping: that it fails on large graphs.",
        "Its first groups: only the placer learns, and the groups stay those at which the grouper begins.",
        "The paper's expert leaves RNNLM on one GPU; the column 'expert' has a layer for each GPU, as Post's and ColocRL's.",
        "ColocRL is not in the paper's table, which only has what it said before.",
    ),
)

# --- ColocRL ---

_COLOCRL = ("CPU only", "single GPU", "Scotch", "MinCut", "expert", "ColocRL")

COLOCRL = Paper(
    "colocrl",
    "ColocRL (ICML 2017), table 2",
    "ColocRL",
    (CPU, ONE, SCOTCH, MINCUT, EXPERT, PaperColumn("ColocRL", "colocrl"), CONTROL, AUTO),
    tuple(
        PaperRow(family, gpus, model, f"{gpus}xK80", _reported(_COLOCRL, *seconds), quick)
        for family, model, quick, both in (
            (
                "RNNLM",
                "rnnlm",
                f"rnnlm:{SMALL_RNNLM}",
                {2: (6.89, 1.57, 13.43, 11.94, 3.81, 1.57), 4: (6.89, 1.57, 11.52, 10.44, 4.46, 1.57)},
            ),
            (
                "NMT-2",
                "nmt:layers=2",
                f"nmt:layers=2,{SMALL_NMT}",
                {2: (10.72, None, 14.19, 11.54, 4.99, 4.04), 4: (10.72, None, 11.23, 11.78, 4.73, 3.92)},
            ),
            (
                "Inception-V3",
                "inception-v3",
                "inception-v3",
                {2: (26.21, 4.60, 25.24, 22.88, 11.22, 4.60), 4: (26.21, 4.60, 23.41, 24.52, 10.65, 3.85)},
            ),
        )
        for gpus, seconds in both.items()
    ),
    ("single GPU", "expert", "Scotch", "MinCut"),
    quick_evaluations=40,
    fitted={"cpu": "CPU only", "gpu": "single GPU"},
    notes=(
        "The K80 presets have Post's CPU, with 8 cores.",
        "The paper's expert splits Inception-V3; ours puts CNNs on one GPU, like those of HDP and Post.",
    ),
)

PAPERS = {paper.name: paper for paper in (POST, POST_PARTS, POST_APPENDIX, SPOTLIGHT, HDP, COLOCRL)}
